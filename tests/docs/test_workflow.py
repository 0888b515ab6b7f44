"""The workflow of .github/: what GitHub accepts, with commands and versions of this repository."""

from __future__ import annotations

import re
import shlex
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from .pages import ROOT
from .test_commands import run, where
from .test_versions import PROJECT

# YAML 1.1 reads `on` as true: as words, all keys and values are what they look like.
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
AS_READ: dict[str, Any] = yaml.safe_load(TEXT.replace("\non:", '\n"on":'))
JOBS: dict[str, Any] = AS_READ["jobs"]
MATRIX: list[dict[str, str]] = JOBS["test"]["strategy"]["matrix"]["include"]


def commands() -> list[str]:
    """All that the jobs run, line by line."""
    steps = [step for job in JOBS.values() for step in job["steps"] if "run" in step]
    lines = [line.strip() for step in steps for line in step["run"].splitlines()]
    return [line for line in lines if "{{" not in line] + [row["command"] for row in MATRIX]


def test_github_accepts_it() -> None:
    schema = get_builtin_schema("vendor.github-workflows")
    jsonschema.validate(AS_READ, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(AS_READ | {"jobs": {"lint": {"runs-on": 1}}}, schema)


def test_each_job_is_bounded_and_may_little() -> None:
    assert set(JOBS) == {"lint", "test", "build", "publish"}
    assert AS_READ["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert allowed == {"publish": {"id-token": "write"}}
    assert all(job["timeout-minutes"] <= 180 for job in JOBS.values())
    assert "cancel-in-progress" in AS_READ["concurrency"]
    for use in re.findall(r"uses: (\S+)", TEXT):
        assert re.fullmatch(r"actions/[a-z-]+@v\d+|pypa/gh-action-pypi-publish@release/v1", use)


def test_a_release_is_a_tag_that_passed_everything() -> None:
    publish = JOBS["publish"]
    assert set(publish["needs"]) == set(JOBS) - {"publish"}
    assert "startsWith(github.ref, 'refs/tags/v')" in publish["if"]
    assert AS_READ["on"]["push"]["tags"] == ["v*"]
    assert not any("run" in step for step in publish["steps"]), "it only uploads what was built"


def test_a_tag_that_is_not_the_version_is_an_error() -> None:
    assert 'bash scripts/dist.sh "$GITHUB_REF"' in commands()
    done = run("bash scripts/dist.sh refs/tags/v0.0.1", ROOT)
    assert done.returncode == 1
    assert f"the tag is v0.0.1, the version in pyproject.toml {PROJECT['version']}" in done.stderr


def test_the_supported_pythons_are_tested() -> None:
    shown = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert [row["python"] for row in MATRIX] == shown
    for row in MATRIX:
        assert where(row["command"]), "a command that the documents show"
        assert set(re.findall(r"PYTHON=python(\S+)", row["command"])) <= {row["python"]}


def test_the_commands_exist() -> None:
    for line in commands():
        for word in shlex.split(line):
            assert not word.startswith("scripts/") or (ROOT / word).is_file(), line
        for extra in re.findall(r"\.\[([\w,]+)\]", line):
            assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"]), line
    assert {"ruff check .", "ruff format --check .", "mypy"} <= set(commands())
