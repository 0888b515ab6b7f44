"""Find a server's launch line in what people have: a line, a script, or a node of a YAML or JSON
file.

Data is pointed at: `FILE#/DOC/key/0` is a JSON Pointer (RFC 6901) with the document's number first.
Without one, the file has to hold exactly one launch for the role. Scripts: plan_shell.py.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_mixkv.tools.plan_shell import LAUNCHER, Line, lines_of, unreadable, value_of

LIMIT = 4 << 20
CONTAINER = ("entrypoint", "command", "args")
ASK = (
    "Let the launch itself say it, in its own environment: SGLANG_MIXKV_PLAN={role}.json COMMAND "
    "ends before it loads a model, and plan --{role} {role}.json reads what it wrote"
)


class Given(NamedTuple):
    """What a role was given: `text`, and the `file` and `pointer` that it came from, if any."""

    text: str
    file: str = ""
    pointer: str = ""


def load(given: str, stdin: str = "") -> Given:
    """Read what `given` names: a file or stdin, with a pointer or without, or the text itself.
    Raises MixKVError for a file that is none, or too large."""
    path, mark, pointer = (given, "", "") if os.path.lexists(given) else given.partition("#")
    is_file = os.path.lexists(path) and (not mark or pointer.startswith("/"))
    if path == "-":
        return Given(stdin, path, pointer)
    if not is_file:
        return Given(given)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise unreadable(f"{path} is no regular file: give its text on stdin, as -")
    if found.st_size > LIMIT:
        text = f"{path} has {found.st_size:,} bytes; expected a launch line, manifest or row of up"
        raise unreadable(f"{text} to {LIMIT:,}: cut the log to the row's line")
    return Given(Path(path).read_text(encoding="utf-8-sig", errors="replace"), path, pointer)


def split(given: Given | str, role: str) -> Line:
    """Return the only launch line for this role. Raises MixKVError if there is none, more than one,
    or one that only a shell can read."""
    given = Given(given) if isinstance(given, str) else given
    try:
        found = _pointed(given, role) if given.pointer else _found(given)
    except RecursionError:
        raise unreadable("its YAML is nested too deep") from None
    fits = (lambda line: line.mode == role, lambda line: line.mode not in ("prefill", "decode"),
            lambda line: True)  # fmt: skip
    each = ([(where, line) for where, line in found if is_fit(line)] for is_fit in fits)
    fitting = next(filter(None, each), [])
    fitting = [one for one in fitting if one[1].launcher] or fitting
    # Nodes of a server, and equal servers, have one line each: the first stands for all.
    lines = {line.key: line for _, line in fitting[::-1]}
    if len(lines) != 1:
        raise unreadable(_none_or_more([where for where, _ in fitting], given, role))
    (line,) = lines.values()
    if line.stop:
        command = ASK.format(role=role).replace("COMMAND", _command(given))
        raise unreadable(f"plan runs no shell, and {line.stop}. {command}")
    return line


def _command(given: Given) -> str:
    is_script = given.file not in ("", "-") and not given.pointer
    return f"bash {shlex.quote(given.file)}" if is_script else "COMMAND"


def _none_or_more(places: list[str], given: Given, role: str) -> str:
    ask = ASK.format(role=role)
    if "{{" in given.text:
        return f"it has a template's {{{{ }}}}: render it first. {ask}"
    if not places:
        whose = f" in {given.file}" if given.file else "; nor is it a file here"
        return f"expected a launch line of SGLang or Dynamo, found none{whose}. {ask}"
    each = "".join(f"\n  --{role} {shlex.quote(f'{given.file}{where}')}" if where[0] == "#"
                   else f"\n  {where}" for where in places)  # fmt: skip
    return f"expected one launch for {role}, got {len(places)}; choose one:{each}\n{ask}"


def _found(given: Given) -> list[tuple[str, Line]]:
    """Find all launches, with their pointers or lines."""
    documents = _documents(given.text)
    if any(isinstance(one, dict | list) for one in documents):
        maps, seen = _maps(documents), set[int]()
        found = [
            (f"#/{n}{where}", line) for n, one in enumerate(documents)
            for where, line in _walk(one, "", maps, [], seen, "services" in (one or ()))
        ]  # fmt: skip
        if found or "\n" in given.text.strip():
            return found
    return [(f"line {line.number}", line) for line in lines_of(given.text, {})]


def _documents(text: str) -> list[Any]:
    import yaml

    try:
        return [*yaml.safe_load_all(text)]
    except (yaml.YAMLError, ValueError):
        return []


def _pointed(given: Given, role: str) -> list[tuple[str, Line]]:
    """Follow a pointer; an entry that is YAML itself can be pointed into."""
    node: Any = _documents(given.text)
    maps, volumes, is_compose, above = _maps(node), list[Any](), False, list[Any]()
    for word in given.pointer.split("/")[1:]:
        key = word.replace("~1", "/").replace("~0", "~")
        if isinstance(node, str):
            node = next(iter(_documents(node)), None)
        if isinstance(node, dict):
            volumes = node.get("volumes") or volumes
            is_compose = is_compose or "services" in node
        above.append(node)
        try:
            node = node[int(key) if isinstance(node, list) else key]
        except (KeyError, IndexError, ValueError, TypeError):
            has = [*node] if isinstance(node, dict) else f"{len(node or ())} entries"
            raise unreadable(f"{given.file}#{given.pointer} has no {key!r}; found {has}") from None
    lines = _node(node, maps, volumes, is_compose)
    if given.pointer.split("/")[-2:-1] == ["sglang_config"]:
        lines = (line._replace(environ=_environment(above[-2], key)) for line in lines)
    return [(f"#{given.pointer}", line) for line in lines]


def _node(node: Any, maps: Any, volumes: list[Any], is_compose: bool) -> Iterator[Line]:
    """Read a node that is pointed at: a container, flags, words, or a line or YAML in a string."""
    if isinstance(node, str):
        inner = next(iter(_documents(node)), None)
        if isinstance(inner, dict | list):
            yield from _node(inner, maps, volumes, is_compose)
        else:
            yield from lines_of(node, {})
    elif isinstance(node, list):
        yield from _container({"args": node}, maps, volumes, is_compose)
    elif isinstance(node, dict) and any(key in node for key in CONTAINER):
        yield from _container(node, maps, volumes, is_compose)
    elif isinstance(node, dict):
        yield Line({}, [], config=node)


def _walk(
    node: Any, where: str, maps: Any, volumes: list[Any], seen: set[int], is_compose: bool
) -> Iterator[tuple[str, Line]]:
    """Find launches at any depth, each node once: containers, flags with a role, and scripts."""
    if isinstance(node, str):
        inner = next(iter(_documents(node)), None) if "disaggregation" in node else None
        if isinstance(inner, dict) and _mode_of(inner):
            yield where, Line({}, [], config=inner)
        elif LAUNCHER.search(node):
            yield from ((where, line) for line in lines_of(node, {}) if line.launcher)
    elif isinstance(node, dict | list) and id(node) not in seen:
        seen.add(id(node))
        children: Any = enumerate(node) if isinstance(node, list) else node.items()
        if isinstance(node, dict):
            volumes = node.get("volumes") or volumes
            if _mode_of(node):
                yield where, Line({}, [], config=node)
            for role, flags in (node.pop("sglang_config", None) or {}).items():
                own = _environment(node, role)
                yield f"{where}/sglang_config/{role}", Line(own, [], config=flags)
            for line in _container(node, maps, volumes, is_compose):
                if line.launcher or "--model-path" in " ".join(line.flags):
                    yield where, line
            children = [(key, one) for key, one in children if key not in CONTAINER]
        elif not where and all(isinstance(one, str | int | float) for one in node):
            yield from ((where, line) for line in _container({"args": node}, maps, [], False))
            return
        for key, child in children:
            step = str(key).replace("~", "~0").replace("/", "~1")
            yield from _walk(child, f"{where}/{step}", maps, volumes, seen, is_compose)


def _environment(recipe: dict[Any, Any], role: str) -> dict[str, str]:
    """The variables that a recipe of srt-slurm has for a role, beside its sglang_config."""
    own = recipe.get(f"{role}_environment") or {}
    return {str(name): str(value) for name, value in own.items()}


def _mode_of(flags: Mapping[Any, Any]) -> str:
    names = ("disaggregation-mode", "disaggregation_mode")
    return next((str(flags[name]) for name in names if name in flags), "")


def _maps(documents: list[Any]) -> dict[str, dict[str, Any]]:
    """The data of each ConfigMap in the file, by its name."""
    found = [one for one in documents if isinstance(one, dict) and one.get("kind") == "ConfigMap"]
    return {str((one.get("metadata") or {}).get("name")): one.get("data") or {} for one in found}


def _container(node: dict[Any, Any], maps: Any, volumes: list[Any], is_compose: bool
               ) -> Iterator[Line]:  # fmt: skip
    """Read a container: its words, its own variables, and the files that ConfigMaps mount."""
    given = [node[key] for key in CONTAINER if isinstance(node.get(key), str | list)]
    if not given:
        return
    notes, environ, outside = list[str](), dict[str, str](), dict[str, str]()
    fill = _compose if is_compose else _kubernetes
    own = node.get("env") or node.get("environment") or {}
    for one in own.items() if isinstance(own, dict) else own if isinstance(own, list) else ():
        if isinstance(one, dict):  # Kubernetes has pairs, compose NAME=VALUE or a mapping
            one = one.get("name"), one.get("value", None if "valueFrom" in one else "")
        name, value = (*one.split("=", 1), None)[:2] if isinstance(one, str) else one
        name = str(name)
        if value is None:
            outside[name] = "comes from outside the file"
        else:
            environ[name], why = fill(str(value), environ, outside, notes)
            outside |= {name: why} if why else {}
    if outside:
        notes.append(f"{', '.join(outside)}: set outside the file, and not read")
    for key in ("envFrom", "env_file"):
        if node.get(key):
            notes.append(f"{key}: its variables were not read")
    try:
        parts = [one if isinstance(one, list) else shlex.split(one) for one in given]
    except ValueError as error:
        raise unreadable(str(error)) from None
    words = [fill(str(word), environ, outside, notes) for part in parts for word in part]
    for line in lines_of(words, environ, outside):
        yield line._replace(notes=(*notes, *line.notes), mounted=_mounted(node, maps, volumes))


def _compose(text: str, _: Any, outside: Mapping[str, str], notes: list[str]) -> tuple[str, str]:
    """Expand $NAME and ${NAME:-default} as compose does; $$ stands for $."""
    missing = list[str]()

    def value(found: re.Match[str]) -> str:
        name, default = found[2] or found[3], found[4]
        if found[1]:
            return "$"
        if default is None:
            missing.append(name)
            return found[0]
        notes.append(f"{name} is taken as {default!r}, its default")
        return default

    word = re.sub(r"\$(?:(\$)|(\w+)|\{(\w+)(?::?-([^{}]*)|[^{}]*)\})", value, text)
    return word, f"{missing[0]} is of the shell that runs compose" if missing else ""


def _kubernetes(
    text: str, environ: Mapping[str, str], outside: Mapping[str, str], _: Any
) -> tuple[str, str]:
    """Expand $(NAME); $$(NAME) stands for $(NAME) itself."""
    missing = list[str]()

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"$({found[2]})"
        if found[2] not in environ:
            missing.append(found[2])
        return environ.get(found[2], found[0])

    word = re.sub(r"\$(\$?)\((\w+)\)", value, text)
    why = "is filled in by what starts the container"
    return word, f"{missing[0]} {outside.get(missing[0], why)}" if missing else ""


def _mounted(node: dict[Any, Any], maps: Any, volumes: list[Any]) -> dict[str, str]:
    """The files that a container's volumes have from ConfigMaps of the same file, by path."""
    sources = {one.get("name"): one.get("configMap") for one in volumes if isinstance(one, dict)}
    found = dict[str, str]()
    for mount in node.get("volumeMounts") or ():
        source = sources.get(mount.get("name")) or {}
        data, at = maps.get(source.get("name"), {}), str(mount.get("mountPath", "")).rstrip("/")
        items = {one["key"]: one.get("path", one["key"]) for one in source.get("items") or ()}
        for key, text in data.items():
            path = items.get(key, key)
            if mount.get("subPath"):
                found |= {at: str(text)} if mount["subPath"] == path else {}
            elif not items or key in items:
                found[f"{at}/{path}"] = str(text)
    return found


__all__ = ["Given", "Line", "load", "split", "unreadable", "value_of"]
