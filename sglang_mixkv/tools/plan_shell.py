"""Read launch lines in shell commands without a shell: words, quotes, continuations and plain
assignments. A variable that plan needs must be set once, on a line of its own, with no branch, loop
or function before it. Otherwise `Line.stop` says why only a shell can read the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sglang_mixkv.errors import MixKVError

LAUNCHER = re.compile(
    r"(?:(?<!\S)\S*/)?sglang serve|(?<!\S)\S*\bsglang[./]launch_server(\.py)?|dynamo\.sglang[\w.]*"
)
_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\."""
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*+\))*+\))*+\)"
_PARENS = rf"(?:[$<>]|(?<==))\((?:{_QUOTED}|\s#[^\n]*|[^()'\"\\]|{_NESTED})*+\)"
_LINE = re.compile(
    rf"((?:\\\n|(?:{_QUOTED}|{_PARENS}|[^ \t\n'\"\\;&|()#])(?:\\\n|#)*|#[^\n]*|[;&|()]|[ \t])*)"
    r"(?:\n|\Z|(?P<unclosed>.))",
    re.DOTALL,
)
_BRACES = r"\{(?=[^{}\s'\"$`]*\})[^{}\s'\"$`]*?(?:,|\.\.)[^}]*\}"
_COMPUTED = rf"\$\{{[^}}]*\}}|{_PARENS}|`[^`]*`|{_BRACES}"
_VARIABLE = r"\$(?:(\w++)(?!(?:\\\n)+\w)|\{(\w+)(?:\[[@*]\])?(:?-[^{}$`]*)?\})"
_TOKEN = re.compile(
    rf"(?:[ \t\n]|\\\n)+|#[^\n]*|\d+(?=[<>])|(?P<word>(?:{_QUOTED}|{_COMPUTED}|"
    r"[^ \t\n'\"\\();<>|&])+)|(?P<operator>[();<>|&]+)|(?P<unclosed>.)",
    re.DOTALL,
)
_PART = re.compile(rf"\A(?:\w+=)?~|{_VARIABLE}|{_QUOTED}|{_COMPUTED}|[$`]", re.DOTALL)
_IN_QUOTES = re.compile(rf"{_VARIABLE}|\\[$`\"\\\n]|[$`]")
_SET = re.compile(r"(?:--env=|-e|\$\{)?([A-Za-z_]\w*)(?:\[\S*\])?[+:]?=(.*)", re.DOTALL)
_ANYTHING = re.compile(
    r"(source|\.|eval|set -(?:a|o allexport)|\[\w.*?\])(?= |$)|(export)(?: \S+)* [$`]|.*(<<)"
)
_OPENS = re.compile(r"(?:.*[^$])?(\(\()|\s*(\((?!.*\))|function\b|[\w.:-]+\s*\(\))", re.DOTALL)
_BRANCHES = {"if", "for", "while", "until", "case", "select", "function", "{", "unset", "read",
             "mapfile", "readarray", "getopts", "let", "printf"}  # fmt: skip
_KEYWORDS = {"then", "else", "elif", "do", "!", "time", "{", "if", "while", "until", "command"}
_NO_LAUNCH = {"echo", "export", "declare", "local", "readonly", "typeset", "alias", "pkill"}
_NEEDED = re.compile(r"(?:SGL(?:ANG)?|MC|MOONCAKE)_(?!\w*(HOST|IP|PORT|DIR|PATH|LOG|URL|TIMEOUT))")
_DROPPED = r"--(?:(?!spec)(?:[\w-]+-)?(?:key|token|password|secret)s?|nnodes|node-rank|"
_DROPPED += r"base-gpu-id|gpu-id-step|(?:[\w-]+-)?port)"  # dropped if unknown: secrets and numbers
HOST = re.compile(
    rf"{_DROPPED}|--(?:host|dist-init-addr|served-model-name|log-level[\w-]*|ssl-[\w-]+|"
    r"(?:disaggregation|mooncake)-ib-device|[\w-]+-(?:url|dir|log))"
)
"""Flags that plan does not need. plan adds a note if only the host knows their values."""
_ELSEWHERE = {"docker", "podman", "nerdctl", "kubectl", "oc", "ssh", "pdsh", "clush", "ray"}
_DROPS = re.compile(r"\benv -\S*|--export[= ](?!.*ALL)|\b(?:sudo(?! -E)|su|runuser|tmux|screen) ")
Word = tuple[str, str]
"""A word, and why it is unknown; "" if it is known."""


def unreadable(text: str) -> MixKVError:
    return MixKVError("MIXKV-START-04", f"{text}.")


class Line(NamedTuple):
    """A server's flags. `launcher`: the command before them. `stop`: why only a shell can read the
    line. Both are "" otherwise. `config`: the mapping of a recipe, or of --config's ConfigMap."""

    environ: Mapping[str, str]
    flags: list[str]
    launcher: str = ""
    notes: tuple[str, ...] = ()
    stop: str = ""
    number: int = 1
    config: Mapping[Any, Any] = {}

    @property
    def is_dynamos(self) -> bool:
        return self.launcher.startswith("dynamo.")

    @property
    def mode(self) -> str:
        given = value_of(self.flags, "--disaggregation-mode")
        return given or str(self.config.get("disaggregation-mode", ""))

    @property
    def key(self) -> str:
        """The part of a line that is the same on all nodes of one server."""
        flags = re.sub(rf"(?:{HOST.pattern})[ =]\S+(?: |$)", "", " ".join([*self.flags, ""]))
        needed = {name: value for name, value in self.environ.items() if _NEEDED.match(name)}
        return f"{self.launcher} {flags} {self.config} {needed} {self.stop}"


def value_of(flags: list[str], name: str) -> str:
    """Return the last value of a flag; "" without one."""
    found = re.findall(rf"(?:^|\n){name}[=\n]([^\n]*)", "\n".join(flags))
    return str(found[-1]) if found else ""


def lines_of(
    text: str, environ: Mapping[str, str], unknown: Mapping[str, str], branch: str = ""
) -> Iterator[Line]:
    """Yield the launch lines of a script. `unknown`: why the values of these variables are unknown;
    `branch`: why all variables that are set or have a default are unknown. Raises ValueError for
    text that no shell accepts, or in which a line that was read is not a server's whole line."""
    known, exported, whys, notes = dict(environ), {*environ}, dict(unknown), dict[str, None]()
    stop, last, is_late = "", -1, False

    def look(name: str, default: str | None) -> Word:
        value = known.get(name)
        why = whys.get(name, branch if value is not None or default is not None else "")
        if default is not None and not why and (value is None or (not value and default[0] == ":")):
            notes[f"{name} is taken as its default"] = None
            value = default.partition("-")[2]
        if why and LAUNCHER.search(value or ""):
            raise ValueError(f"plan runs no shell, and {name} {why}")
        unset = "is an argument of the script" if name.isdigit() else "is not set in it"
        return value or "", why or unset * (value is None)

    for number, line in _lines(text.replace("\r\n", "\n")):
        is_alone = len([*_commands(line, look)]) == 1
        if opens := _OPENS.match(line):
            branch = branch or f"may be changed in line {number} ({opens[1] or opens[2]})"
        if last == number and line.lstrip().startswith("--"):
            why = "is cut off from its command by a comment or a missing backslash"
            raise ValueError(f"{line.split()[0].split('=')[0]} {why}: a shell does not pass it on")
        for words in _commands(line, look):
            texts, sets = [word for word, _ in words], [_SET.match(word) for word, _ in words]
            at = next((n for n, text in enumerate(texts) if text not in _KEYWORDS), 0)
            first, begins = texts[at], [text for text in texts[: at + 1] if text in _BRANCHES]
            if _is_launch(texts) and first not in _NO_LAUNCH and not all(sets[at:]):
                last, is_late = number + line.count("\n") + 1, is_late or bool(branch)
                own = {name: value for name, value in known.items() if name in exported}
                at_risk = whys | dict.fromkeys(own.keys() - environ, branch) if branch else whys
                for one in line_of(words, own, at_risk, number, stop, branch):
                    yield one._replace(notes=(*notes, *one.notes))
            elif found := _ANYTHING.match(" ".join(texts[at:])):
                stop = stop or f"line {number} ({found[found.lastindex or 0]}) can set anything"
            elif first != "echo" and (first != "printf" or "-v" in texts):
                if begins:
                    branch = branch or f"may be changed in line {number} ({begins[0]})"
                is_export = first == "export"
                is_plain = is_alone and line[:1] not in " \t(" and all(sets[is_export:])
                for given, (word, why) in zip(sets, words, strict=True):
                    name = given[1] if given else word * is_export
                    if name in known:
                        why = f"is set again in line {number}"
                    elif not word.startswith(f"{name}=") or why or not is_plain:
                        why = f"is computed in line {number}, or set under a condition"
                    elif _NEEDED.match(name) and not is_export:
                        why = f"is not exported in line {number}"
                    if name and is_late and _NEEDED.match(name):
                        raise ValueError(f"{name} is set after a launch in a function or branch")
                    if name:
                        known[name] = known.get(name, "") + (given[2] if given else "")
                        exported |= {name} if is_export or why else set()
                        whys |= {name: why} if why else {}


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number; one that ends in a backslash or in quotes goes on."""
    number = 1
    for found in _LINE.finditer(text):
        if found["unclosed"]:
            raise ValueError(f"line {number}: No closing quotation")
        yield number, found[1]
        number += 1 + found[1].count("\n")


def _commands(line: str, look: Callable[[str, str | None], Word]) -> Iterator[list[Word]]:
    """Yield the commands of a line, with known variables in place, and without redirections."""
    command, is_file, whys = list[Word](), False, list[str]()

    def value(found: re.Match[str]) -> str:
        text, name = found[0], found[1] or found[2]
        if text[0] == "\\":
            return text[1:].strip("\n")
        known, why = look(name, found[3]) if name else ("", "only a shell computes it")
        if why:
            whys.append(f"{name} {why}" if name else why)
        return text if why else known

    def part(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] == "'":
            return "\1" + text[1:-1]
        if text[0] == '"':
            return "\1" + _IN_QUOTES.sub(value, text[1:-1])
        return re.sub(r"[ \t\n]+", "\0", value(found)) if found[1] or found[2] else value(found)

    for token in _TOKEN.finditer(f"{line}\n;"):
        if token["unclosed"]:
            raise ValueError("No closing quotation")
        if operator := token["operator"]:
            is_file = bool({*"<>"} & {*operator})
            command += [(operator, "")] * ("<<" in operator)
            if operator[0] == "(" and _is_launch([word for word, _ in command] or [""]):
                raise ValueError("a shell accepts no ( after a launch line")
            if command and not is_file:
                yield command
                command = []
        elif word := token["word"]:
            whys.clear()
            texts = [] if is_file else _PART.sub(part, word).split("\0")
            command += ((text.replace("\1", ""), "".join(whys[:1])) for text in texts if text)
            is_file = False


def _is_launch(texts: list[str]) -> bool:
    named = {text.partition("=")[0] for text in texts}
    is_named = bool(named & {"--model-path", "--model", "--config"})
    return is_named or texts[0].startswith("--") or bool(LAUNCHER.search(" ".join(texts)))


def line_of(
    words: list[Word], environ: Mapping[str, str], unknown: Mapping[str, str], number: int = 0,
    stop: str = "", branch: str = "",
) -> Iterator[Line]:  # fmt: skip
    """Yield the launch line in a command, or the lines in a script that the command quotes."""
    texts = [text for text, _ in words]
    begin = next((n for n, word in enumerate(texts, 1) if LAUNCHER.fullmatch(word)
                  or LAUNCHER.fullmatch(" ".join(texts[max(0, n - 2) : n]))), 0)  # fmt: skip
    launcher = texts[begin - 1] if begin else ""
    bare = (re.sub(_COMPUTED, "", word) for word in texts if not launcher)
    scripts = [n for n, word in enumerate(bare) if " " in word and LAUNCHER.search(word)]
    if not launcher:
        flags = (n for n, word in enumerate(texts) if word.startswith("--"))
        begin = next(iter([*scripts, *flags]), len(texts))
    is_elsewhere = bool(_ELSEWHERE & {*texts[:begin]})
    own, changed = ({}, {}) if is_elsewhere else (dict(environ), dict(unknown))
    notes = list[str]()
    for before, (text, why) in zip(["", *texts], words[:begin], strict=False):
        is_list = "--export" in (before, text.partition("=")[0])
        for one in text.removeprefix("--export=").split(",") if is_list else [text]:
            if found := _SET.fullmatch(one):
                own[found[1]] = found[2]
                changed.pop(found[1], None)
                changed |= {found[1]: why} if why else {}
        if (before in ("-e", "--env") and text.isidentifier()) or text.startswith("--env-file"):
            notes.append(f"{text} comes from outside, and was not read")
        elif why and not found and re.search(r"(?i)\$.*(?:env|arg|opt|[@*(])|`", text):
            notes.append("a word before the launcher is unknown, and what it sets was not read")
        if (drops := _DROPS.search(f"{before} {text}")) and any(map(_NEEDED.match, own)):
            stop = stop or f"{drops[0].strip(' =/')} drops variables"
    for name, why in changed.items():
        if _NEEDED.match(name) and name in own:
            stop = stop or f"{name} {why}"
        elif not scripts:
            own.pop(name, None)
    for script in scripts:
        for line in lines_of(texts[script], own, changed, branch):
            yield line._replace(notes=(*notes, *line.notes), stop=stop or line.stop)
    if not launcher and begin:
        notes.append("the flags follow no launcher, and are taken as all of the server's")
    if not scripts and words[begin:] and (launcher or begin == 0 or _is_launch(texts)):
        rest = words[begin:]
        kept, more, why = _kept(rest, number)
        model = ["--model-path"] * (launcher == "serve" and rest[0][0][:1] != "-")
        yield Line(own, [*model, *kept], launcher, (*notes, *more), stop or why, number)


def _kept(words: list[Word], number: int) -> tuple[list[str], list[str], str]:
    """Return the flags to keep, notes on flags with unknown values that plan does not need, and why
    another unknown value stops plan. No word is printed, since it may be a key."""
    kept, notes = list[str](), list[str]()
    for before, (text, why) in zip(["", *(text for text, _ in words)], words, strict=False):
        name = text.partition("=")[0] if text.startswith("--") else before
        if why and not HOST.fullmatch(name):
            return kept, notes, f"line {number}: {why}" if number else why
        if why:
            notes.append(f"{name}: {why}, and plan does not need it")
        if not (why and re.fullmatch(_DROPPED, name)):
            kept.append(text)
        elif name == before:
            kept.pop()
    return kept, notes, ""
