"""docs/troubleshooting.md has each text with which the plugin refuses or warns, by its own words.

The texts are read off the source: of each refusal, error and log line the first clause, of that
the longest part between two values, of that the first six words. What `protocol/frames.py` finds wrong
with a control message is logged behind "drops a message" and is documented by that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_mixkv
from sglang_mixkv import refusals as startup
from sglang_mixkv.config import Config
from sglang_mixkv.protocol import facts
from sglang_mixkv.tools import plan_flags

PACKAGE = Path(sglang_mixkv.__file__).parent
DOCUMENT = PACKAGE.parent / "docs" / "troubleshooting.md"
SAID_BY = {
    "record_failure", "refuse", "stop", "warning", "error", "exception", "RequestFailed",
    *(f"{kind}Error" for kind in ("MixKV", "Runtime", "Value")),
}  # fmt: skip
WORDS, VALUE = 6, "\0"
# The doctor prints what to do with each of its findings, the demo and the harness are no product.
ELSEWHERE = ("protocol/frames.py", "errors.py", "cpu/")
TOOLS = ("tools/plan", "tools/accept", "demo/pair.py")


def squeezed(text: str) -> str:
    return " ".join(text.replace("`", "").split())


TEXT = squeezed(DOCUMENT.read_text())


def sources() -> list[Path]:
    def counts(name: str) -> bool:
        return not name.startswith((*ELSEWHERE, "tools/")) or name.startswith(TOOLS)

    return [p for p in sorted(PACKAGE.rglob("*.py")) if counts(str(p.relative_to(PACKAGE)))]


def fixed_parts(node: ast.expr | None) -> list[str]:
    """What is the same each time in a text, cut at its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"%[sd]", node.value)
    if isinstance(node, ast.JoinedStr):
        texts = [v.value if isinstance(v, ast.Constant) else VALUE for v in node.values]
        return "".join(map(str, texts)).split(VALUE)
    if isinstance(node, ast.BinOp):
        return [*fixed_parts(node.left), *fixed_parts(node.right)]
    return []


def words(source: str, *, returns: bool = False) -> Iterator[str]:
    """The words to look for of each text that a module can say, or (`returns`) hands back."""
    for node in ast.walk(ast.parse(source)):
        said = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            said = list(node.args) if name in SAID_BY else []
            said += [word.value for word in node.keywords if word.arg == "failure_reason"]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "reason":
            said = [node.value]
        elif isinstance(node, ast.Return) and returns:
            said = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for text in said:
            clause = re.split(r"[.;] |\n", VALUE.join(fixed_parts(text)))[0]
            parts = [squeezed(part).strip(" .:;,({[") for part in clause.split(VALUE)]
            longest = max(parts, key=len)
            if " " in longest:
                yield " ".join(longest.split()[:WORDS]).rstrip(",")
                break


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_text_is_there(path: Path) -> None:
    returns = path.parent.name in ("managers", "core")
    found = words(path.read_text(), returns=returns)
    missing = [text for text in found if text not in TEXT]
    assert missing == [], "add what it means, and what to do, to docs/troubleshooting.md"


@pytest.mark.parametrize("name", [rule[0] for rule in startup.ARGUMENT_RULES])
def test_every_refused_argument_is_there(name: str) -> None:
    assert f"| `{name}` |" in DOCUMENT.read_text()


def test_every_other_refusal_at_start_is_there() -> None:
    """Of variables, and of what `cold` does not go with."""
    environ = {
        "SGLANG_RUST_SERVER": "1",
        "SGLANG_DISAGG_STAGING_BUFFER": "1",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK",
        "SGLANG_MOONCAKE_SEND_AUX_TCP": "1",
    }
    args = plan_flags.from_line("decode", "--disaggregation-decode-enable-radix-cache").args
    found = startup.refusals(args, environ, Config(on_draft_mismatch="cold"))
    written = Path(startup.__file__).read_text().count("found.append(")
    assert len(found) == written + 1, "one is not tried here; one line says two of them"
    args.dcp_size = args.attn_cp_size = 2
    found += startup._verify_rules(args)
    missing = [t for t in found if f"| `{t.partition(' is not')[0]}` |" not in DOCUMENT.read_text()]
    assert missing == []


@pytest.mark.parametrize("what", [row[1] for row in (*facts._COMPARED, *facts._DRAFT_COMPARED)])
def test_every_compared_fact_is_there(what: str) -> None:
    assert f"{what}: prefill has" in TEXT


def test_a_new_text_would_be_missed() -> None:
    source = (
        "def f(self, room):\n"
        "    logger.warning('sglang-mixkv is tired of %s', room)\n"
        "    raise MixKVError(f'{room} has too many colours: {self.n}.')\n"
        "def g():\n"
        "    return refuse(f'at most {n} pink umbrellas', 'more', 'rain', 'Go home')\n"
        "def h():\n"
        "    return f'{x} is no reason to go on like this any longer'\n"
    )
    assert set(words(source, returns=True)) == {
        "is no reason to go on", "pink umbrellas", "sglang-mixkv is tired of",
        "has too many colours",
    }  # fmt: skip
