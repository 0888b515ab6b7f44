"""Find the command that starts a server in a launch line, script, Kubernetes manifest or compose
file. The text is split into commands with their variables, and SGLang's or Dynamo's command is
taken, even inside a word, as in `bash -c "..."`. No shell runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from sglang_mixkv.errors import MixKVError

_LAUNCHER = re.compile(
    r"(?:\S*/)?sglang serve|\S*\bsglang[./]launch_server(?:\.py)?|dynamo\.sglang(?:\.\w+)*"
)
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\((\w+)\)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?<!\S)#[^\n]*""", re.DOTALL)
_ARRAY = re.compile(r"(?<!\S)(\w+\+?)=\(([^()]*)\)")
_COMPUTED = re.compile(r"\$\(\(?[^()]*\)\)?|`[^`]*`")
_REDIRECTION = re.compile(r"\d?[<>]")
_PLACE = re.compile(r"--(?:node-rank|(?:\w+-)*port|host|base-gpu-id|dist-init-addr)[ =]\S+")
_OF_CONTAINER = ("entrypoint", "command", "args")


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


class Line(NamedTuple):
    """A server's flags. `launcher`: the command that takes them, "" if unknown. `unread`: what a
    shell would replace, and SGLang's variables that are set but not exported."""

    environ: dict[str, str]
    flags: list[str]
    launcher: str = ""
    unread: tuple[str, ...] = ()

    @property
    def is_dynamos(self) -> bool:
        return self.launcher.startswith("dynamo.")


def split(text: str, role: str = "") -> Line:
    """Return the only launch line, or the only one with this role. Raises MixKVError if there is
    none, or more than one."""
    try:
        found = _lines_of_yaml(text) or [*_lines_of_script(text, {})]
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # odd YAML, or shlex
        raise error if isinstance(error, MixKVError) else unreadable(str(error)) from None
    mode = re.compile(rf"--disaggregation-mode[ =]{role}\b")
    for is_better in (
        lambda line: line.launcher,
        lambda line: "--model-path" in line.flags,
        lambda line: mode.search(" ".join(line.flags)),
    ):
        found = [*filter(is_better, found)] or found
    # Nodes of a server, and equal servers, have one line each: the first stands for all.
    lines = {_PLACE.sub("", " ".join(line.flags)): line for line in found[::-1]}
    if len(lines) != 1:
        each = [f"\n  {' '.join((line.launcher, *line.flags)):.90}" for line in found]
        text = "Give SGLang's or Dynamo's, or a script, manifest or compose file with one"
        raise unreadable(f"expected one launch line, got {len(lines)}{''.join(each)}\n{text}")
    (line,) = lines.values()
    words = (word for word in line.flags if "$" in word or "`" in word)
    return line._replace(unread=(*line.unread, *words))


def _line(words: list[str], environ: Mapping[str, str]) -> Iterator[Line]:
    """Find a command's launch line, if it has flags, or the lines of a script in it."""
    starts = (n for n, word in enumerate(words, 1) if _LAUNCHER.fullmatch(word)
              or _LAUNCHER.fullmatch(" ".join(words[max(0, n - 2) : n])))  # fmt: skip
    begin = next(starts, 0)
    launcher = words[begin - 1] if begin else ""
    script = next((word for word in words if " " in word and _LAUNCHER.search(word)), "")
    if not begin:
        begin = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    before = words if script and not launcher else words[:begin]
    own = {**environ, **_assigned(before, environ)}
    if script and not launcher:
        yield from _lines_of_script(script, own)
    elif flags := words[begin:]:
        end = next((n for n, word in enumerate(flags) if _REDIRECTION.match(word)), len(flags))
        model = [] if flags[0].startswith("-") else ["--model-path"]
        yield Line(own, [*model, *flags[:end]], launcher)


def _assigned(words: list[str], known: Mapping[str, str]) -> dict[str, str]:
    found = dict[str, str]()
    for name, is_more, value in (m.groups() for w in words if (m := _ASSIGNMENT.fullmatch(w))):
        found[name] = known.get(name, "") + value if is_more else value
    return found


def _filled(word: str, known: Mapping[str, str]) -> list[str]:
    """Expand known variables in a word; a word that is just a variable with flags is split."""
    filled = _VARIABLE.sub(lambda v: known.get(v[1] or v[2] or v[3], v[4] or v[0]), word)
    if not (_VARIABLE.fullmatch(word) and filled.lstrip().startswith("-")):
        return [filled]
    return shlex.split(filled) if "[" in word else filled.split()


def _lines_of_script(text: str, environ: Mapping[str, str]) -> Iterator[Line]:
    known, exported, has_begun = dict(environ), dict(environ), False
    for whole in _commands(text):
        words = [part for word in whole for part in _filled(word, known)]
        if has_begun and words and words[0].startswith("--"):
            text = "is cut off from its command by a comment or a missing backslash"
            raise unreadable(f"{words[0]} {text}: a shell starts the server without it")
        lines = [*_line(words, exported)]
        has_begun = any(line.launcher for line in lines)
        unread = tuple(n for n in known if n.startswith("SGLANG_") and n not in exported)
        yield from (line._replace(unread=(*line.unread, *unread)) for line in lines)
        if not lines:
            known |= _assigned(words, known)
            names = [word.partition("=")[0] for word in words] if "export" in words else []
            exported |= {name: known[name] for name in names if name in known}


def _commands(text: str) -> Iterator[list[str]]:
    """Split a script into the words of each command, without comments."""
    text = _COMMENT.sub(lambda found: found[1] or "", text.replace("\r\n", "\n"))
    text = text.replace("\\\n", " ")
    text = _ARRAY.sub(lambda found: f"{found[1]}={shlex.quote(f' {found[2]}')}", text)
    text = _COMPUTED.sub(lambda found: re.sub(r"[\s;&|]+", "\N{NO-BREAK SPACE}", found[0]), text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    for is_end, words in groupby(lexer, lambda word: word != "" and set(word) <= set("\n;&|")):
        if not is_end:
            yield [*words]


def _lines_of_yaml(text: str) -> list[Line]:
    """Find the launch lines in a manifest, compose file or list of words; none in other text."""
    import yaml

    try:
        documents = [*yaml.safe_load_all(text)]
    except yaml.YAMLError:
        return []
    wholes = [{"args": one} if isinstance(one, list) else one for one in documents]
    return [line for one in wholes if not isinstance(one, str) for line in _containers(one)]


def _containers(node: Any) -> Iterator[Line]:
    """Find launch lines at any depth: in nodes with a command, and in values that are scripts."""
    if isinstance(node, str) and _LAUNCHER.search(node):
        yield from _lines_of_script(node, {})
    elif isinstance(node, dict):
        given = [node[key] for key in _OF_CONTAINER if isinstance(node.get(key), str | list)]
        words = [str(w) for g in given for w in (shlex.split(g) if isinstance(g, str) else g)]
        environ = dict[str, str]()
        own = node.get("env") or node.get("environment") or {}
        for one in own.items() if isinstance(own, dict) else own:
            if isinstance(one, dict):  # Kubernetes has pairs, compose NAME=VALUE or a mapping
                one = one["name"], one.get("value")
            name, value = one.partition("=")[::2] if isinstance(one, str) else one
            if value is not None:
                environ[name] = " ".join(_filled(str(value), environ))
        unread = ("envFrom",) if node.get("envFrom") else ()
        for line in _line([part for word in words for part in _filled(word, environ)], environ):
            yield line._replace(unread=(*line.unread, *unread))
        node = [node[key] for key in node if key not in _OF_CONTAINER]
    if isinstance(node, list):
        for child in node:
            yield from _containers(child)
