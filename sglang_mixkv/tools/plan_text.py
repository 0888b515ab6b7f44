"""Find a server's launch line in a text, a script, or a node of a YAML or JSON file.

`FILE#/DOC/key/0` names a node by a JSON Pointer (RFC 6901) with the document's number first.
Without a pointer, the file must have exactly one launch for the role. plan_shell.py reads scripts.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.plan_shell import LAUNCHER, Line, line_of, lines_of, unreadable, value_of

LIMIT = 4 << 20
CONTAINER = ("entrypoint", "command", "args")
_BESIDE = re.compile(
    r"(?i)\w*env_?(?:from|file)\w*|\w+_?env(?:s|ironment)?|\w+(args|flags)|extends"
)
ASK = (
    "Have the launch write its arguments: SGLANG_MIXKV_PLAN={role}.json {command} "
    "exits before it loads a model, and plan --{role} {role}.json reads what it wrote"
)


class Given(NamedTuple):
    """The input for a role: `text`, and the `file` and `pointer` that it came from, if any."""

    text: str
    file: str = ""
    pointer: str = ""


def load(given: str, stdin: str = "") -> Given:
    """Read what `given` names: a file or stdin, with a pointer or without, or the text itself.
    Raises MixKVError for a path that is not a regular file, and for a file that is too large."""
    path, mark, pointer = (given, "", "") if os.path.lexists(given) else given.partition("#")
    if path == "-":
        return Given(stdin, path, pointer)
    if not os.path.lexists(path) or (mark and not pointer.startswith("/")):
        return Given(given)
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise unreadable(f"{path} is not a regular file: give its text on stdin, as -")
    if found.st_size > LIMIT:
        text = f"{path} has {found.st_size:,} bytes; expected a launch line, manifest or row of up"
        raise unreadable(f"{text} to {LIMIT:,}: cut the log to the row's line")
    return Given(Path(path).read_text(encoding="utf-8-sig", errors="replace"), path, pointer)


def split(given: Given | str, role: str) -> Line:
    """Return the role's only launch line. Raises MixKVError unless there is one that plan reads."""
    given = Given(given) if isinstance(given, str) else given
    is_script = not re.search(r"^-?$|\.(?:ya?ml|json)$", given.file)
    command = f"bash {shlex.quote(given.file)}" if is_script else "COMMAND"
    ask = ASK.format(role=role, command=command)
    try:
        found = _found(given)
    except MixKVError:
        raise
    except ValueError as error:  # from shlex and plan_shell.py
        raise unreadable(f"{error}. {ask}") from None
    except (AttributeError, LookupError, TypeError):
        raise unreadable(f"its lists and mappings are not those of a manifest. {ask}") from None
    named = [one for one in found if one[1].mode == role]
    others = [one for one in found if one[1].mode not in ("prefill", "decode")]
    fitting = [one for one in named or others or found if one[1].launcher]
    # Flags without a launcher may be those of a function or an array that another line starts.
    fitting = fitting or [*named, *(one for one in others if one[1].launcher)] or others or found
    # Nodes of one server, and equal servers, have lines with the same key: use the first.
    lines = [*{line.key: line for _, line in fitting[::-1]}.values()]
    if "{{" in given.text and not any(one.launcher or "\n" not in given.text for one in lines):
        raise unreadable(f"it has a template's {{{{ }}}}: render it first. {ask}")
    if not lines:
        whose = f" in {given.file}" if given.file else ", and no such file is here"
        raise unreadable(f"expected a launch line of SGLang or Dynamo, found none{whose}. {ask}")
    if len(lines) > 1:
        places = (
            f"--{role} {shlex.quote(given.file + where)}" if where[0] == "#" else where
            for where, _ in fitting
        )
        text = f"expected one launch for {role}, got {len(fitting)}; choose one:"
        raise unreadable("\n".join([text, *(f"  {place}" for place in places), ask]))
    if lines[0].stop:
        raise unreadable(f"plan runs no shell, and {lines[0].stop}. {ask}")
    return lines[0]


class _Node(NamedTuple):
    """A node of a file: its value, `where` it is, and the mappings above it, the innermost last."""

    value: Any
    where: str
    above: tuple[Any, ...]

    @property
    def key(self) -> str:
        return self.where.rpartition("/")[2]

    def steps(self) -> Iterator[_Node]:
        """Yield the children, with strings that are YAML themselves read."""
        value = self.value
        above = (*self.above, value) if isinstance(value, dict) else self.above
        listed = enumerate(value if isinstance(value, list) else ())
        for key, child in value.items() if isinstance(value, dict) else listed:
            step = str(key).replace("~", "~0").replace("/", "~1")
            if isinstance(child, str) and re.search("disaggregation|model", child):
                inner = next(iter(_documents(child)), None)
                child = inner if isinstance(inner, dict | list) else child
            yield _Node(child, f"{self.where}/{step}", above)


def _found(given: Given) -> list[tuple[str, Line]]:
    """Find all launches, or the one at the pointer, with their pointers or line numbers."""
    documents, found, seen = _documents(given.text), list[tuple[str, Line]](), set[int]()
    is_data = given.pointer or any(isinstance(one, dict | list) for one in documents)
    data = [one for one in documents if isinstance(one, dict) and one.get("kind") == "ConfigMap"]
    maps = {str((one.get("metadata") or {}).get("name")): one.get("data") or {} for one in data}
    nodes = [*_Node(documents, "#", ()).steps()] if is_data else []
    for node in nodes:
        is_named = node.where == f"#{given.pointer}"
        if not given.pointer or is_named:
            found += ((node.where, line) for line in _lines(node, maps, is_named=is_named))
        if is_named:
            return found
        if not isinstance(node.value, dict | list) or id(node.value) not in seen:
            seen.add(id(node.value))  # an alias is read once
            nodes += (one for one in node.steps() if given.pointer or one.key not in CONTAINER)
    if given.pointer:
        raise unreadable(f"{given.file} has no node {given.pointer}")
    if found or (is_data and "\n" in given.text.strip()):
        return found
    return [(f"line {line.number}", line) for line in lines_of(given.text, {}, {})]


def _documents(text: str) -> list[Any]:
    import yaml

    try:
        found = [*yaml.safe_load_all(text)]
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    # A command with ": " in it is a mapping, too.
    return [one for one in found if not (isinstance(one, dict) and LAUNCHER.search(str([*one])))]


def _lines(node: _Node, maps: Mapping[str, Any], *, is_named: bool) -> Iterator[Line]:
    """Read a node: a container, flags, words or a string. Unless named, it must be a launch."""
    value = node.value
    is_whole = is_named or node.where.count("/") == 1
    if isinstance(value, str):
        if is_named or LAUNCHER.search(value):
            yield from (one for one in _container({}, node, maps) if is_named or one.launcher)
    elif isinstance(value, dict) and any(isinstance(value.get(k), str | list) for k in CONTAINER):
        for line in _container(value, node, maps):
            if is_named or line.launcher or "--model-path" in " ".join(line.flags):
                yield line
    elif isinstance(value, dict):
        recipe = node.above[-2] if len(node.above) > 1 else {}  # srt-slurm's
        is_recipe = node.above[-1:] == (recipe.get("sglang_config", ""),)
        own = recipe.get(f"{node.key}_environment") or {}
        config = {str(k).replace("_", "-"): v for k, v in value.items() if v is not None}
        line = Line({str(k): str(v) for k, v in own.items()}, [], config=config)
        if is_named or is_recipe or line.mode or (is_whole and "model-path" in config):
            yield line
    elif isinstance(value, list) and is_whole and all(isinstance(v, str | int) for v in value):
        yield from _container({"args": value}, node, maps)


def _container(own: dict[Any, Any], node: _Node, maps: Mapping[Any, Any]) -> Iterator[Line]:
    """Read a container or a script: its words, the variables of its own and of the mappings above
    it, and the file of --config that a ConfigMap of the same file mounts."""
    is_map = any(one.get("kind") == "ConfigMap" for one in node.above)
    notes = ["the variables of the container that runs it were not read"] * is_map
    environ, outside = dict[str, str](), dict[str, str]()
    fill = _compose if any("services" in one for one in node.above[:1]) else _kubernetes
    levels = [*node.above, own]
    sources = own.get("envFrom") or ()
    names = [one.get("prefix") or (one.get("configMapRef") or {}).get("name") for one in sources]
    given = [one.get(key) for one in levels for key in ("envs", "env", "environment")]
    given[:0] = map(maps.get, names)
    listed = (a.items() if isinstance(a, dict) else a for a in given if isinstance(a, dict | list))
    for one in (pair for pairs in listed for pair in pairs):
        if isinstance(one, dict):  # Kubernetes has pairs, compose NAME=VALUE or a mapping
            ref = (one.get("valueFrom") or {}).get("configMapKeyRef") or {}
            there = maps.get(ref.get("name"), {}).get(ref.get("key")) if "valueFrom" in one else ""
            one = one.get("name"), one.get("value", there)
        name, value = (*one.split("=", 1), None)[:2] if isinstance(one, str) else one
        if value is None:
            outside[str(name)] = "comes from outside the file"
        else:
            environ[str(name)], why = fill(str(value), environ, outside)
            outside |= {str(name): why} if why else {}
    if outside:
        notes.append(f"{', '.join(outside)}: set outside the file, and not read")
    keys = [str(key) for one in levels for key in one if one[key]]
    beside = (_BESIDE.fullmatch(k) for k in keys if k != "envFrom" or not maps.keys() >= {*names})
    notes += (f"{one[0]}: its {one[1] or 'variables'} were not read" for one in beside if one)
    parts = (one for one in map(own.get, CONTAINER) if isinstance(one, str | list))
    parts = (shlex.split(one) if isinstance(one, str) else one for one in parts)
    words = [fill(str(word), environ, outside) for part in parts for word in part]
    is_script = isinstance(node.value, str)
    read = lines_of(node.value, environ, outside) if is_script else line_of(words, environ, outside)
    for line in read:
        path = value_of(line.flags, "--config") or value_of(line.flags, "--disagg-config")
        file = next(iter(_documents(_mounted(path, own, node, maps))), None) or {}
        file = file.get(value_of(line.flags, "--disagg-config-key"), file)
        yield line._replace(notes=(*notes, *line.notes), config=file)


def _compose(text: str, *_: Any) -> tuple[str, str]:
    """Replace $$ with $. Compose takes all variables from its own shell."""
    found = re.search(r"(?<!\$)(?:\$\$)*\$\{?(\w+)", text)
    return text.replace("$$", "$"), f"{found[1]} comes from compose's own shell" if found else ""


def _kubernetes(text: str, environ: dict[str, str], outside: dict[str, str]) -> tuple[str, str]:
    """Expand $(NAME); $$(NAME) becomes the literal $(NAME)."""
    pattern = re.compile(r"\$(\$?)\((\w+)\)")
    names = [name for is_plain, name in pattern.findall(text) if not is_plain]
    missing = [name for name in names if name not in environ]
    word = pattern.sub(lambda m: f"$({m[2]})" if m[1] else environ.get(m[2], m[0]), text)
    why = "is filled in by what starts the container"
    return word, f"{missing[0]} {outside.get(missing[0], why)}" if missing else ""


def _mounted(path: str, own: dict[Any, Any], node: _Node, maps: Mapping[str, Any]) -> str:
    """Return the text of a file that a ConfigMap of the same file mounts; "" if none does."""
    volumes: Any = next((one["volumes"] for one in node.above[::-1] if one.get("volumes")), [])
    sources = {one.get("name"): one.get("configMap") for one in volumes if isinstance(one, dict)}
    for mount in own.get("volumeMounts") or ():
        source = sources.get(mount.get("name")) or {}
        items = {one.get("path", one["key"]): one["key"] for one in source.get("items") or ()}
        data = maps.get(str(source.get("name")), {})
        at = str(mount.get("mountPath", "")).rstrip("/")
        entry = mount.get("subPath") if path == at else path.removeprefix(f"{at}/")
        if path.startswith(at) and items.get(entry, str(entry)) in data:
            return str(data[items.get(entry, str(entry))])
    return ""
