"""Generate the tables of settings and of judged pairs in the documents.

python scripts/docs/tables.py            # rewrite them
python scripts/docs/tables.py --check    # exit status 1 if one is not current
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from sglang_mixkv import config
from tests.pure.tools.test_recipes import MODELS, RECIPES

DOCS = Path(__file__).parents[2] / "docs"

LINKS = {
    "an SGLang that the plugin refuses": "compatibility.md#releases",
    "the channel's times": "protocol.md#times",
    "by the transfer backend": "#mooncake-or-nixl",
}
"""Maps words in the descriptions to the places that explain them."""
TARGETS = {
    "DeepSeek-V3.1": "DeepSeek-V3, R1, V3.1", "GLM-5.2": "GLM-5", "Kimi-K2.5": "Kimi-K2 to K2.7",
    "Kimi-K3": "Kimi-K3, K3.1", "Llama-3.1-70B": "Llama-3", "QwQ-32B": "Qwen2.5, QwQ",
}  # fmt: skip
"""Maps a judged model to the row's name, with other models of the same shape."""
JUDGED = {True: "needed", False: "not needed", None: "refused"}


def settings() -> list[tuple[str, ...]]:
    """Return (flag, variable, values, default, meaning) for each setting."""
    found = [("flag", "variable", "values", "default", "meaning")]
    for one in config.SETTINGS:
        text = one.help
        for words, place in LINKS.items():
            text = text.replace(words, f"[{words}]({place})")
        flag = f"`{one.flag}`" if one.flag else ""
        default = "off" if one.default is False else str(one.default or "")
        found.append((flag, f"`{one.environ}`", one.words, default, text))
    return found


def pairs() -> list[tuple[str, ...]]:
    """Return the verdicts on pairs of unequal sizes, by model and drafter. Manifests, scripts, and
    lines with other faults are omitted."""
    read = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for names, kind in (
        ("--tp --tp-size", int), ("--dp --dp-size --attn-dp-size", int), ("--dcp-size", int),
        ("--speculative-algorithm", str), ("--disaggregation-transfer-backend", str),
        ("--model-path", str), ("--speculative-draft-model-path", str),
    ):  # fmt: skip
        read.add_argument(*names.split(), type=kind, default=1 if kind is int else "")
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for both, *each, needed, _, more in RECIPES.values():
        try:
            lines = [shlex.split(f"{both} {side}", comments=True) for side in each]
            source, wanted = (read.parse_known_args(line)[0] for line in lines)
        except (argparse.ArgumentError, ValueError):
            continue
        one, two = sizes = [side.tp // side.dp for side in (source, wanted)]
        target, algorithm = source.model_path, source.speculative_algorithm
        fits = one != two and min(sizes) > 0 and max(sizes) % min(sizes) == 0
        if not (fits and algorithm and target in MODELS) or (
            needed is not None and "found" in more
        ):
            continue
        drafter, path = algorithm, source.speculative_draft_model_path
        if path and path != target:
            heads = MODELS[path]["num_key_value_heads"]
            drafter += ", MLA" if "kv_lora_rank" in MODELS[path] else f", {heads} KV heads"
        elif algorithm in ("EAGLE", "NEXTN"):
            drafter = "MTP layer"
        case = f"{one} -> {two}" + f" with DCP {wanted.dcp_size}" * (wanted.dcp_size > 1)
        case += f" ({source.disaggregation_transfer_backend})".replace(" ()", "")
        name = target.partition("/")[2]
        of_row = rows.setdefault((TARGETS.get(name, name), drafter), {})
        of_row.setdefault(JUDGED[needed], []).append(case)
    head = ("target", "drafter", "the plugin, by attention TP of prefill -> decode")
    found = [head]
    for key, of in sorted(rows.items()):
        words = (f"{word}: {', '.join(dict.fromkeys(cases))}" for word, cases in of.items())
        found.append((*key, "; ".join(words)))
    return found


TABLES = {("deploy.md", "flags"): settings, ("compatibility.md", "models"): pairs}


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "".join(f"{line.replace('|  |', '| |')}\n" for line in lines)


def main(argv: list[str]) -> int:
    """Write the tables between their markers, or compare them; return 1 if one is not current."""
    status = 0
    for (page, name), rows in TABLES.items():
        present = (DOCS / page).read_text()
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = present.partition(begin)
        wanted = f"{before}{begin}{table(rows())}{end}{rest.partition(end)[2]}"
        if "--check" not in argv:
            (DOCS / page).write_text(wanted)
        elif present != wanted:
            print(f"docs/{page} is not current: run python scripts/docs/tables.py")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
