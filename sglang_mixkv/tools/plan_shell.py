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
_NESTED = r"\$?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_PART = (
    rf"""'[^']*'|"(?:\\.|\${_NESTED[3:]}|[^"\\])*"|\\.|\$\{{[^}}]*\}}|\${_NESTED[3:]}|`[^`]*`"""
    r"""|(?<==)\([^()]*\)|[^\s;&|<>()'"\\`]"""
)
_TOKEN = re.compile(
    rf"(?P<skip>(?:[ \t\r]|\\\r?\n)+|(?<![^\s;&|()])#[^\n]*)|(?P<here><<(?!<))"
    rf"|(?P<into>(?:\d+|&)?(?:>>|>\||<<<|[<>])(?:&[\d-]|[ \t]*(?:{_PART}|{_NESTED})+))"
    rf"|(?P<end>&&|\|\||;;|[;&|()\n])|(?P<word>(?:{_PART})+)",
    re.DOTALL,
)
_PIECE = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^'"\\]+)""", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:(:?-)([^{}$`]*))?\})")
_COMPUTED = re.compile(rf"\${_NESTED[3:]}|`[^`]*`|\$[\d@*#?!$-]|\$\{{[^}}]*\}}|\$'")
_ASSIGNMENT = re.compile(r"(?:--env=|-e)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_OPEN = {"if", "for", "while", "until", "case", "select", "function", "{"}
_CLOSE = {
    "fi": ("if",),
    "done": ("for", "while", "until", "select"),
    "esac": ("case",),
    "}": ("{",),
}
_GO_ON = {"then", "else", "elif", "do", "in", "!", "time"}
_DECLARE = {"export", "declare", "typeset", "readonly", "local"}
_SETTERS = {"for", "select", "read", "mapfile", "readarray", "getopts", "let"}
_NEEDED = re.compile(r"(?:SGLANG|MC|MOONCAKE)_(?!\w*(?:HOST|IP|PORT|DIR|PATH|LOG|URL|TIMEOUT))")
_SECRET = re.compile(r"--(?:[\w-]+-)?(?:key|token|password|secret)s?")
_NUMBER = re.compile(r"--(?:nnodes|node-rank|base-gpu-id|gpu-id-step|(?:[\w-]+-)?port)")
HOST = re.compile(
    rf"{_SECRET.pattern}|{_NUMBER.pattern}|--(?:host|dist-init-addr|served-model-name|"
    r"(?:disaggregation|mooncake)-ib-device|log-[\w-]+|ssl-[\w-]+|[\w-]+-(?:url|dir|log))"
)
"""Flags that plan does not need: a value that only the host knows is a note."""
_GLUE = {code: 0xE000 + code for code in b" \t\n\r"}  # blanks at which a word is not split
_UNGLUE = {glued: code for code, glued in _GLUE.items()}
_ELSEWHERE = {"docker", "podman", "nerdctl", "kubectl", "ssh"}


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


class Line(NamedTuple):
    """A server's flags. `launcher`: the command that takes them, "" if unknown. `stop`: why only a
    shell could read it. `config`: flags as a mapping; `mounted`: files that a ConfigMap has."""

    environ: Mapping[str, str]
    flags: list[str]
    launcher: str = ""
    notes: tuple[str, ...] = ()
    stop: str = ""
    number: int = 1
    config: Mapping[Any, Any] = {}
    mounted: Mapping[str, str] = {}

    @property
    def is_dynamos(self) -> bool:
        return self.launcher.startswith("dynamo.")

    @property
    def settings(self) -> Mapping[Any, Any]:
        """The flags that are given as a mapping, here or in a file of --config."""
        import yaml

        text = self.mounted.get(value_of(self.flags, "--config"), "")
        text = text or self.mounted.get(value_of(self.flags, "--disagg-config"), "")
        found = yaml.safe_load(text) if text else self.config
        key = value_of(self.flags, "--disagg-config-key")
        found = found.get(key, found) if isinstance(found, dict) else {}
        return found if isinstance(found, Mapping) else {}

    @property
    def mode(self) -> str:
        mine = {str(key).replace("_", "-"): value for key, value in self.settings.items()}
        given = value_of(self.flags, "--disaggregation-mode")
        return given or str(mine.get("disaggregation-mode", ""))

    @property
    def key(self) -> str:
        """What two lines of one server have in common."""
        parts = (" ".join(group) for group in _groups(self.flags) if not HOST.fullmatch(
            group[0].partition("=")[0]))  # fmt: skip
        needed = {name: value for name, value in self.environ.items() if _NEEDED.match(name)}
        return f"{self.launcher} {' '.join(parts)} {self.settings} {needed} {self.stop}"


def value_of(flags: list[str], name: str) -> str:
    """Return the last value of a flag; "" without one."""
    found = ""
    for word, after in zip(flags, [*flags[1:], ""], strict=False):
        if word == name:
            found = after
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def _groups(words: list[str]) -> Iterator[list[str]]:
    """Split words into flags with what follows them."""
    group = list[str]()
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    yield from [group] * bool(group)


Word = tuple[str, str]
"""A word, and why it is not known; "" if it is."""


def lines_of(
    source: str | list[Word], environ: Mapping[str, str], unsure: Mapping[str, str] | None = None
) -> Iterator[Line]:
    """Yield the launch lines of a script, or of the words of a command."""
    if isinstance(source, str):
        yield from _script(source, environ, dict(unsure or {}))
    else:
        yield from _command(source, environ, unsure or {}, 0, "")


def _script(text: str, environ: Mapping[str, str], unsure: dict[str, str]) -> Iterator[Line]:
    known, exported, mine = dict(environ), {*environ}, set[str]()
    chain, stop, notes, has_begun = dict[str, str](), "", list[str](), False
    for number, raw, depth, before in _commands(text):
        if before not in ("&&", "||"):
            unsure |= chain
            chain = {}
        if has_begun and raw[0].startswith("--") and before == "\n":
            why = "is cut off from its command by a comment or a missing backslash"
            raise unreadable(f"{raw[0]} {why}: a shell starts the server without it")
        has_begun, first = False, raw[0]
        if first in (".", "source", "eval") or re.fullmatch(r"\[\w+\]|.*<<", first):
            stop = f"line {number} ({first}) can set anything"
        elif first == "set" and re.search(r"(?:^| )-\w*a|allexport", " ".join(raw[1:])):
            stop = f"line {number} (set -a) exports all that follows"
        elif first == "unset" or first in _SETTERS or raw[:2] == ["printf", "-v"]:
            unsure |= dict.fromkeys(raw[1:], f"is changed by {first} in line {number}")
        elif first in _DECLARE or all(map(_ASSIGNMENT.fullmatch, raw)):
            for one in raw[first in _DECLARE :]:
                name, more, value = _assigned(one)
                if first == "export" or "-x" in raw:
                    exported.add(name)
                if one == name or not name:
                    continue
                (whole, why), *others = filled(f'"{value}"' if '"' not in value else value, known,
                                               unsure, notes) or [("", "")]  # fmt: skip
                whole = " ".join([whole, *(other for other, _ in others)])
                if why:
                    why = f"is computed in line {number}"
                elif value.startswith("("):
                    why = f"is an array, set in line {number}"
                elif depth or before == "||":
                    why = f"is set in a branch, a loop or a function in line {number}"
                elif name in mine and not more:
                    why = f"is set again in line {number}"
                elif name in known and name not in mine and not more and name in environ:
                    why = f"is set again in line {number}" * (known[name] != whole)
                known[name] = known.get(name, "") + whole if more else whole
                mine.add(name)
                if why:
                    unsure[name] = why
                elif before == "&&":
                    chain[name] = f"is set under a condition in line {number}"
        else:
            words = [word for one in raw for word in filled(one, known, unsure, notes)]
            seen = {name: known[name] for name in exported if name in known}
            for line in _command(words, seen, unsure, number, stop):
                has_begun = has_begun or bool(line.launcher)
                local = (n for n in known if n.startswith("SGLANG_") and n not in exported)
                said = (f"{name} is set but not exported: the server does not see it"
                        for name in local if name not in line.environ)  # fmt: skip
                yield line._replace(notes=(*notes, *line.notes, *said))


def _assigned(raw: str) -> tuple[str, str, str]:
    found = _ASSIGNMENT.fullmatch(raw)
    return (found[1], found[2], found[3]) if found else (raw, "", "")


def _commands(text: str) -> Iterator[tuple[int, list[str], int, str]]:
    """Yield each command: its line, its words as written, how deep it is in branches, loops,
    functions and subshells, and the operator before it."""
    at, raw, within, before, number = 0, list[str](), list[str](), "\n", 1
    text = f"{text}\n"
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise unreadable(f"line {line}: No closing quotation, or brackets that do not match")
        at, kind = found.end(), found.lastgroup
        if kind == "here":
            raw = [f"{' '.join(raw[:1])} <<"]
        elif kind == "word":
            number = number if raw else text.count("\n", 0, found.start()) + 1
            raw.append(found[0])
        elif kind == "end":
            while raw and raw[0] in _OPEN | {*_CLOSE} | _GO_ON:
                if raw[0] in _OPEN:
                    within.append(raw[0])
                elif within[-1:] and within[-1] in _CLOSE.get(raw[0], ()):
                    within.pop()
                if raw[0] in _SETTERS:
                    break
                raw.pop(0)
            if raw:
                yield number, raw, len(within), before
            if found[0] == "(":
                within.append("(")
            elif found[0] == ")" and within[-1:] == ["("]:
                within.pop()
            raw, before = [], found[0]


def filled(raw: str, known: Mapping[str, str], unsure: Mapping[str, str], notes: list[str]
           ) -> list[Word]:  # fmt: skip
    """Expand a word as written into words, as a shell would; each with why it is not known."""
    whys, parts, is_quoted = list[str](), list[str](), False

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[2], found[4]
        if name in unsure:
            whys.append(f"{name} {unsure[name]}")
        elif name in known and (known[name] or found[3] != ":-"):
            return known[name]
        elif default is not None:
            notes.append(f"{name} is taken as {default!r}, its default")
            return default
        else:
            is_of_script = "an argument of the script" if name.isdigit() else "not set in it"
            whys.append(f"{name} is {is_of_script}")
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


def _command(
    words: list[Word], environ: Mapping[str, str], unsure: Mapping[str, str], number: int, stop: str
) -> Iterator[Line]:
    """Find a command's launch line, or those of a script in one of its words."""
    texts = [text for text, _ in words]
    begin = next((n for n, word in enumerate(texts, 1) if LAUNCHER.fullmatch(word)
                  or LAUNCHER.fullmatch(" ".join(texts[max(0, n - 2) : n]))), 0)  # fmt: skip
    launcher = texts[begin - 1] if begin else ""
    inner = next((n for n, word in enumerate(texts) if not launcher and re.search(r"\s", word)
                  and LAUNCHER.search(word)), -1)  # fmt: skip
    if not begin:
        first = (n for n, word in enumerate(texts) if word.startswith("--"))
        begin = inner if inner >= 0 else next(first, len(texts))
    notes, own = list[str](), {} if _ELSEWHERE & {*texts[:begin]} else dict(environ)
    changed = {} if _ELSEWHERE & {*texts[:begin]} else dict(unsure)
    for n, (text, why) in enumerate(words[:begin]):
        for one in text.removeprefix("--export=").split(",") if "--export=" in text else [text]:
            if found := _ASSIGNMENT.fullmatch(one):
                own[found[1]] = own.get(found[1], "") * bool(found[2]) + found[3]
                changed |= {found[1]: why} if why else {}
            elif n and texts[n - 1] in ("-e", "--env") and one.isidentifier():
                notes.append(f"{one} comes from outside (-e {one}), and was not read")
        if text.startswith("--env-file"):
            notes.append("the variables of --env-file were not read")
        elif text in ("-i", "-u") and "env" in texts[:n]:
            stop = stop or f"env {text} drops variables"
    for name, why in changed.items():
        if _NEEDED.match(name) and (name in own or "unset" in why):
            stop = stop or f"{name} {why}"
            own.pop(name, None)
    if inner >= 0:
        for line in _script(texts[inner], own, changed):
            yield line._replace(notes=(*notes, *line.notes), stop=stop or line.stop)
        return
    rest = words[begin:]
    if not rest or not (launcher or begin == 0 or {"--model-path", "--model", "--config"} & {
            text.partition("=")[0] for text, _ in rest}):  # fmt: skip
        return
    flags = ["--model-path"] * (launcher == "serve" and rest[0][0][:1] != "-")
    for n, (text, why) in enumerate(rest):
        name = text.partition("=")[0]
        is_value = bool(n and not text.startswith("--"))
        name = rest[n - 1][0] if is_value else name
        if why and not HOST.fullmatch(name):
            shown = "" if _SECRET.fullmatch(name) else f" {text}"
            stop = stop or f"line {number} has{shown}: {why}" if number else f"{text}: {why}"
        elif why:
            notes.append(f"{name}: {why}, and plan does not need it")
            is_dropped = _NUMBER.fullmatch(name) or _SECRET.fullmatch(name)
            if is_dropped and is_value:
                flags.pop()
            if is_dropped:
                continue
        flags.append(text)
    yield Line(own, flags, launcher, tuple(notes), stop, number)
