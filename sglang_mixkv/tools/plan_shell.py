"""Read launch lines out of shell commands, without a shell: words, quotes, continuations and plain
assignments. What only a shell can know (branches, loops, `$(...)`, arguments, files that are
sourced) stops a line if it can reach a flag or a variable that plan needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sglang_mixkv.errors import MixKVError

LAUNCHER = re.compile(
    r"(?:\S*/)?sglang serve|\S*\bsglang[./]launch_server(?:\.py)?|dynamo\.sglang(?:\.\w+)*"
)
_BRACKETS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PART = (
    rf"""'[^']*'|"(?:\\.|\${_BRACKETS}|[^"\\])*"|\\.|\$\{{[^}}]*\}}|\${_BRACKETS}|`[^`]*`"""
    r"""|(?<==)\([^()]*\)|[^\s;&|<>()'"\\`]"""
)
_TOKEN = re.compile(
    r"(?P<skip>(?:[ \t\r]|\\\r?\n)+|(?<![^\s;&|()])#[^\n]*)|(?P<here><<(?!<))"
    rf"|(?P<into>(?:\d+|&)?(?:>>|>\||<<<|[<>])(?:&[\d-]|[ \t]*(?:{_PART}|{_BRACKETS})+))"
    rf"|(?P<end>&&|\|\||;;|[;&|()\n])|(?P<word>(?:{_PART})+)",
    re.DOTALL,
)
_PIECE = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^'"\\]+)""", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?-)([^{}$`]*))?\})")
_COMPUTED = re.compile(rf"\${_BRACKETS}|`[^`]*`|\$[\d@*#?!$-]|\$\{{[^}}]*\}}|\$'")
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_GLUE = {code: 0xE000 + code for code in b" \t\n\r"}  # blanks at which a word is not split
_UNGLUE = {glued: code for code, glued in _GLUE.items()}
_DEPTH = dict.fromkeys(("if", "for", "while", "until", "case", "select", "{"), 1)
_DEPTH |= dict.fromkeys(("fi", "done", "esac", "}"), -1)
_DEPTH |= dict.fromkeys(("then", "else", "elif", "do", "in", "!", "time", "function"), 0)
_SURE = {"cd", "export", "mkdir", "set", "ulimit"}
_LOOPS, _BLANKET = {"for", "select"}, {".", "source", "eval"}
_SETTERS = _LOOPS | {"unset", "read", "mapfile", "readarray", "getopts", "let", "printf",
                     "declare", "typeset", "readonly", "local"}  # fmt: skip
_NEEDED = re.compile(r"(?:SGLANG|MC|MOONCAKE)_(?!\w*(?:HOST|IP|PORT|DIR|PATH|LOG|URL|TIMEOUT))")
_SECRET = re.compile(r"--(?:[\w-]+-)?(?:key|token|password|secret)s?")
_NUMBER = re.compile(r"--(?:nnodes|node-rank|base-gpu-id|gpu-id-step|(?:[\w-]+-)?port)")
HOST = re.compile(
    rf"{_SECRET.pattern}|{_NUMBER.pattern}|--(?:host|dist-init-addr|served-model-name|"
    r"(?:disaggregation|mooncake)-ib-device|log-[\w-]+|ssl-[\w-]+|[\w-]+-(?:url|dir|log))"
)
"""Flags that plan does not need: a value that only the host knows is a note."""
_ELSEWHERE = {"docker", "podman", "nerdctl", "kubectl", "ssh"}


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


def taken(name: str, default: str) -> str:
    """Note a variable's default; of a key, not its value."""
    is_secret = re.search(r"(?i)key|token|passw|secret", name)
    return f"{name} is taken as {'***' if is_secret else repr(default)}, its default"


class Line(NamedTuple):
    """A server's flags. `launcher`: the command that takes them, "" if unknown. `stop`: why only a
    shell could read it, if so. `config`: flags that a recipe lists as a mapping. `file`: what
    a ConfigMap has for --config."""

    environ: Mapping[str, str]
    flags: list[str]
    launcher: str = ""
    notes: tuple[str, ...] = ()
    stop: str = ""
    number: int = 1
    config: Mapping[Any, Any] = {}
    file: Mapping[Any, Any] = {}

    @property
    def is_dynamos(self) -> bool:
        return self.launcher.startswith("dynamo.")

    @property
    def mode(self) -> str:
        mine = {str(name).replace("_", "-"): v for name, v in (self.file or self.config).items()}
        given = value_of(self.flags, "--disaggregation-mode")
        return given or str(mine.get("disaggregation-mode", ""))

    @property
    def key(self) -> str:
        """What two lines of one server have in common."""
        flags = re.sub(rf"(?:{HOST.pattern})[ =]\S+(?: |$)", "", " ".join([*self.flags, ""]))
        needed = {name: value for name, value in self.environ.items() if _NEEDED.match(name)}
        return f"{self.launcher} {flags} {self.config} {self.file} {needed} {self.stop}"


def value_of(flags: list[str], name: str) -> str:
    """Return the last value of a flag; "" without one."""
    found = re.findall(rf"(?:^|\n){name}[=\n]([^\n]*)", "\n".join(flags))
    return str(found[-1]) if found else ""


Word = tuple[str, str]
"""A word, and why it is not known; "" if it is."""


def lines_of(text: str, environ: Mapping[str, str], unknown: Mapping[str, str]) -> Iterator[Line]:
    """Yield the launch lines of a script. `unknown`: why variables are not known."""
    known, exported, unsure = dict(environ), {*environ}, dict(unknown)
    stop, notes, has_begun = "", list[str](), False
    for number, raw, is_sure in _commands(text):
        first = raw[0]
        if has_begun and first.startswith("--"):
            why = "is cut off from its command by a comment or a missing backslash"
            raise unreadable(f"{first} {why}: a shell starts the server without it")
        has_begun = False
        if first in _BLANKET or "<<" in raw or raw[:2] == ["set", "-a"] or re.match(r"\[\w", first):
            stop = stop or f"line {number} ({first}) can set anything"
        elif first in _SETTERS:
            names = (word.partition("=")[0] for word in raw[1:])
            unsure |= dict.fromkeys(names, f"is changed by {first} in line {number}")
        elif first == "export" or all(map(_ASSIGNMENT.fullmatch, raw)):
            for one in raw[first == "export" :]:
                name, _, value = one.partition("=")
                more, name = name.endswith("+"), name.rstrip("+")
                exported |= {name} if first == "export" else set()
                if "=" not in one:
                    continue
                words = filled(value, known, unsure, notes)
                whole = known.get(name, "") * more + " ".join(word for word, _ in words)
                is_again = known.get(name, whole) != whole and not more
                is_computed = any(why for _, why in words)
                whys = (
                    "is computed" * is_computed, "is an array" * (value[:1] == "("),
                    "is set in a branch, a loop, a function or under a condition" * (not is_sure),
                    "is set again" * is_again,
                )  # fmt: skip
                if any(whys):
                    unsure[name] = f"{next(filter(None, whys))} in line {number}"
                known[name] = whole
        else:
            words = [word for one in raw for word in filled(one, known, unsure, notes)]
            seen = {name: known[name] for name in exported if name in known}
            for line in line_of(words, seen, unsure, number, stop):
                has_begun = True
                local = {n for n in known if n.startswith("SGLANG_")} - exported - {*line.environ}
                said = (f"{name} is set but not exported, so the server does not see it"
                        for name in sorted(local))  # fmt: skip
                yield line._replace(notes=(*notes, *line.notes, *said))


def _commands(text: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield each command's line and words as written, and whether it runs in any case: outside of
    branches, loops, functions and subshells, and after `&&` only where nothing is asked."""
    at, raw, depth, brackets, before, number, last = 0, list[str](), 0, 0, "", 1, ""
    text = f"{text}\n"
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise unreadable(f"line {line}: No closing quotation, or brackets that do not match")
        number = number if raw else text.count("\n", 0, at) + 1
        at, kind, token = found.end(), found.lastgroup, found[0]
        raw += [token] * (kind in ("word", "here"))
        if kind == "end":
            while raw and raw[0] in _DEPTH:
                depth = max(0, depth + _DEPTH[raw[0]])
                if raw[0] in _LOOPS:
                    break
                raw.pop(0)
            if raw:
                is_sure = before not in ("&&", "||") or (before == "&&" and last in _SURE)
                yield number, raw, is_sure and not (depth or brackets)
                last = raw[0]
            brackets = max(0, brackets + (token == "(") - (token == ")"))
            raw, before = [], token


def filled(raw: str, known: Mapping[str, str], unsure: Mapping[str, str], notes: list[str]
           ) -> list[Word]:  # fmt: skip
    """Expand a word as written into words, as a shell would; each with why it is not known."""
    whys, parts, is_quoted = list[str](), list[str](), False

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[4]
        if name not in unsure and name in known and (known[name] or found[3] != ":-"):
            return known[name]
        if name not in unsure and default is not None:
            notes.append(taken(name, default))
            return default
        why = "is an argument of the script" if name.isdigit() else "is not set in it"
        whys.append(f"{name} {unsure.get(name, why)}")
        return found[0]

    for single, double, escaped, bare in _PIECE.findall(raw):
        text = double or bare
        if _COMPUTED.search(_VARIABLE.sub("", re.sub(r"\\.", "", text))):
            whys.append("only a shell computes it")
            text = _COMPUTED.sub(lambda one: one[0].translate(_GLUE), text)
        text = _VARIABLE.sub(value, text)
        if not bare:
            is_quoted = True
            text = single or escaped.strip("\n") or re.sub(r"\\([$`\"\\\n])", r"\1", text)
            text = text.translate(_GLUE)
        parts.append(text)
    words = [word.translate(_UNGLUE) for word in "".join(parts).split()] or [""] * is_quoted
    return [(word, whys[0] if whys else "") for word in words]


def line_of(
    words: list[Word], environ: Mapping[str, str], unsure: Mapping[str, str], number: int = 0,
    stop: str = "",
) -> Iterator[Line]:  # fmt: skip
    """Find a command's launch line, or those of a script in one of its words."""
    texts = [text for text, _ in words]
    begin = next((n for n, word in enumerate(texts, 1) if LAUNCHER.fullmatch(word)
                  or LAUNCHER.fullmatch(" ".join(texts[max(0, n - 2) : n]))), 0)  # fmt: skip
    launcher = texts[begin - 1] if begin else ""
    scripts = (n for n, word in enumerate(texts) if " " in word and LAUNCHER.search(word))
    inner = -1 if launcher else next(scripts, -1)
    if not launcher:
        flags = (n for n, word in enumerate(texts) if word.startswith("--"))
        begin = max(inner, 0) or next(flags, len(texts))
    is_elsewhere = bool(_ELSEWHERE & {*texts[:begin]})
    own, changed = ({}, {}) if is_elsewhere else (dict(environ), dict(unsure))
    notes = list[str]()
    for before, (text, why) in zip(["", *texts], words[:begin], strict=False):
        for one in text.removeprefix("--export=").split(",") if "--export=" in text else [text]:
            if found := _ASSIGNMENT.fullmatch(one):
                own[found[1]] = own.get(found[1], "") * bool(found[2]) + found[3]
                changed |= {found[1]: why} if why else {}
        if (before in ("-e", "--env") and text.isidentifier()) or text.startswith("--env-file"):
            notes.append(f"{text} comes from outside, and was not read")
        elif before == "env" and text in ("-i", "-u"):
            stop = stop or f"env {text} drops variables"
    for name, why in changed.items():
        if _NEEDED.match(name) and (name in own or "changed" in why):
            stop = stop or f"{name} {why}"
        elif own.pop(name, None) is not None:
            notes.append(f"{name}: {why}, and plan does not need it")
    if inner >= 0:
        for line in lines_of(texts[inner], own, changed):
            yield line._replace(notes=(*notes, *line.notes), stop=stop or line.stop)
        return
    rest = words[begin:]
    named = {text.partition("=")[0] for text, _ in rest}
    if rest and (launcher or begin == 0 or named & {"--model-path", "--model", "--config"}):
        kept, more, why = _kept(rest, number)
        model = ["--model-path"] * (launcher == "serve" and rest[0][0][:1] != "-")
        yield Line(own, [*model, *kept], launcher, (*notes, *more), stop or why, number)


def _kept(words: list[Word], number: int) -> tuple[list[str], list[str], str]:
    """Return the flags that are known or that plan does not need, notes on those it leaves, and
    why others stop it. No value of a key is shown."""
    kept, notes = list[str](), list[str]()
    for before, (text, why) in zip(["", *(text for text, _ in words)], words, strict=False):
        name = text.partition("=")[0] if text.startswith("--") else before
        if why and not HOST.fullmatch(name):
            return kept, notes, f"line {number} has {text}: {why}" if number else f"{text}: {why}"
        if why:
            notes.append(f"{name}: {why}, and plan does not need it")
        if why and (_NUMBER.fullmatch(name) or _SECRET.fullmatch(name)):
            kept += [] if name != before else [kept.pop()][:0]
        else:
            kept.append(text)
    return kept, notes, ""
