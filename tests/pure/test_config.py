"""Configuration, and the checks at start."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from sglang_mixkv import config, refusals
from sglang_mixkv.config import Config, add_flags, config_of, resolve
from sglang_mixkv.engine import releases
from sglang_mixkv.errors import MixKVError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)  # a second time is no error
    return parser.parse_args(argv)


BOOLEANS: tuple[dict[str, object], tuple[str, ...]] = (
    {"1": True, "Yes": True, " on ": True, "y": True, "n": False, "OFF": False}, ("maybe", "-1"),
)  # fmt: skip
VALUES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "enabled": BOOLEANS,
    "allow_untested_sglang": BOOLEANS,
    "staging_mb": (
        {"1": 1, " 64": 64, "16384": 16384}, ("0", "-1", "16385", "1.5", "1e3", "64MB", "nan"),
    ),
    "on_draft_mismatch": ({"refuse": "refuse", "cold": "cold"}, ("warm", "Cold")),
    "patience": (
        {"0.1": 0.1, "1": 1.0, "6e1": 60.0},
        ("0", "0.0001", "-1", "61", "nan", "inf", "-inf", "1 s"),
    ),
    "port": (
        {"1024": 1024, "65000": 65000},
        ("0", "80", "1023", "65001", "65536", "-1", "tcp://10.0.0.1:80"),
    ),
    "data_plane": ({"mooncake": "mooncake", "nixl": "nixl"}, ("nixI", "NIXL", "mori")),
    "nixl_params": (
        {"{}": {}, '{"num_threads": "4"}': {"num_threads": "4"}},
        ("{", "4", "[]", '{"num_threads": 4}', '{"a": null}', "a=b"),
    ),
}  # fmt: skip
"""Of each setting: texts inside of its bounds and their values, and texts outside."""

INSIDE = [(one, *pair) for one in config.SETTINGS for pair in VALUES[one.field][0].items()]
OUTSIDE = [(one, text) for one in config.SETTINGS for text in VALUES[one.field][1]]


def name_of(value: object) -> str:
    return value.field if isinstance(value, config.Setting) else repr(value)


def test_every_setting_has_bounds_and_an_empty_text_means_its_default() -> None:
    assert set(VALUES) == {one.field for one in config.SETTINGS} == set(Config.__struct_fields__)
    assert resolve(None, {one.environ: " " for one in config.SETTINGS}) == Config()
    assert resolve(parse("--enable-mixkv"), {"SGLANG_ENABLE_MIXKV": "0"}).enabled


@pytest.mark.parametrize(("setting", "text", "value"), INSIDE, ids=name_of)
def test_a_value_inside_of_its_bounds_is_taken(
    setting: config.Setting, text: str, value: object
) -> None:
    assert getattr(resolve(None, {setting.environ: text}), setting.field) == value
    if setting.flag and setting.field != "enabled":
        assert getattr(resolve(parse(setting.flag, text), {}), setting.field) == value


@pytest.mark.parametrize(("setting", "text"), OUTSIDE, ids=name_of)
def test_a_value_outside_is_refused_with_its_name_and_what_is_expected(
    setting: config.Setting, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = "[MIXKV-START-04] expected {} to be {}; got {!r}. Otherwise "
    with pytest.raises(MixKVError) as refused:
        resolve(None, {setting.environ: text})
    assert str(refused.value).startswith(expected.format(setting.environ, setting.words, text))
    if setting.flag and setting.field != "enabled":
        with pytest.raises(SystemExit):
            parse(f"{setting.flag}={text}")
        said = " ".join(capsys.readouterr().err.split())
        assert expected.format(setting.flag, setting.words, text) in said


@pytest.mark.parametrize("service", ["SGLANG_MIXKV_ROUTER", "SGLANG_MIXKV"])
def test_what_kubernetes_says_of_a_service_is_no_setting(service: str) -> None:
    """But for one that is called sglang-mixkv, whose address has a setting's name."""
    ends = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP",
            "PORT_80_TCP_PROTO", "PORT_80_TCP_PORT", "PORT_80_TCP_ADDR")  # fmt: skip
    environ = dict.fromkeys((f"{service}_{end}" for end in ends), "tcp://10.0.0.1:80")
    environ.pop(config.PORT_ENV, None)
    assert resolve(None, {**environ, config.API_KEY_ENV: "key", "PATH": "/bin"}) == Config()


def arguments(**changed: object) -> SimpleNamespace:
    """Resolved arguments of a server that is supported."""
    base = {
        "disaggregation_mode": "prefill",
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_decode_allocation_policy": "early",
        "disaggregation_decode_host_receive_threshold": 1,
        "speculative_algorithm": "EAGLE3",
        "decoupled_spec_role": "null",
    }
    return SimpleNamespace(**base | changed)


def refused(args: SimpleNamespace, **environ: str) -> list[str]:
    return refusals.broken(refusals.ARGUMENT_RULES, args, environ)


REFUSED = [
    ({"disaggregation_mode": "null"}, "--disaggregation-mode"),
    ({"disaggregation_transfer_backend": "mori"}, "mooncake"),
    ({"use_ray": True}, "--use-ray"),
    ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
    ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "prefill_complete"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    (
        {"enable_memory_saver": True, "disaggregation_transfer_backend": "nixl"},
        "--enable-memory-saver",
    ),
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"speculative_algorithm": "UNO"}, "it has no draft KV that could be moved"),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, "it has no draft KV that could be moved"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ({"decoupled_spec_role": "drafter"}, "--decoupled-spec-role"),
    *(({"device": name}, "--device other") for name in ("npu", "xpu", "musa", "mps", "npu:0")),
]
WITH_A_DRAFTER = [
    ({"kv_canary": "log"}, "--kv-canary"),
    ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
    ({"enable_lmcache": True}, "--enable-lmcache"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
]


def test_each_unsupported_choice_is_refused_by_name_and_by_a_rule_of_its_own() -> None:
    hit = set[str]()
    for changed, name in (*REFUSED, *WITH_A_DRAFTER):
        (refusal,) = refused(arguments(**changed))
        assert name in refusal
        hit.add(refusal)
    assert len(hit) == len(refusals.ARGUMENT_RULES)
    (text,) = refused(arguments(), SGLANG_RUST_SERVER="1", SGLANG_MOONCAKE_CUSTOM_MEM_POOL="1")
    assert text.startswith("SGLANG_RUST_SERVER=1 is not supported")
    assert refused(arguments(), SGLANG_RUST_SERVER="0") == []


HOST_CACHE = {"enable_hierarchical_cache": True, "disaggregation_decode_enable_radix_cache": True}
SERVED = [
    *({"disaggregation_mode": mode, **HOST_CACHE} for mode in ("prefill", "decode")),
    *({"disaggregation_transfer_backend": name} for name in refusals.BACKENDS),
    *({"device": device} for device in (None, "cuda", "cuda:1", "cpu")),
    *({"speculative_algorithm": name} for name in ("NEXTN", "STANDALONE", "DFLASH", "dspark")),
    {"dcp_size": 2},
    {"disaggregation_enable_kv_checksum": True},
]
WITHOUT_A_DRAFTER = [
    changed | {"speculative_algorithm": algorithm}
    for changed in (*SERVED[:4], *(changed for changed, _ in WITH_A_DRAFTER))
    for algorithm in (None, "none", "NGRAM")
]


@pytest.mark.parametrize("changed", [*SERVED, *WITHOUT_A_DRAFTER], ids=str)
def test_what_is_supported_or_left_to_sglang_is_not_refused(changed: dict) -> None:
    assert refused(arguments(**changed)) == []


UNSERVED = {
    releases.RADIX_CACHE: {"disaggregation_decode_enable_radix_cache": True},
    releases.DCP: {"dcp_size": 2},
}


@pytest.mark.parametrize("rule", UNSERVED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("release", [*releases.UNSERVED, "99.0"])
def test_what_a_release_does_not_serve_is_refused_there(
    release: str, rule: refusals.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untested one is taken for the newest."""
    monkeypatch.setattr(releases, "sglang_version", lambda: release)
    refused_there = releases.UNSERVED.get(release, releases.UNSERVED["0.5.23"])
    off, on = (0, 1) if release == "0.5.21" else (1, 0.9)

    def broken(threshold: float, **changed: object) -> list[str]:
        changed["disaggregation_decode_host_receive_threshold"] = threshold
        return refusals.broken(releases.rules(), arguments(**changed), {})

    assert broken(off) == []
    assert broken(off, **UNSERVED[rule]) == [str(rule)] * (rule in refused_there)
    (text,) = broken(on)
    assert text.startswith("--disaggregation-decode-host-receive-threshold other than")
    assert set(refused_there[1:]) <= set(UNSERVED)


@pytest.mark.parametrize("name", config.REMOVED)
def test_a_removed_setting_stops_the_start_and_says_what_to_do(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("--"):
        with pytest.raises(SystemExit):
            parse(name, "packed")
        said = " ".join(capsys.readouterr().err.split())
        assert f"[MIXKV-START-04] {name} is no longer a setting" in said
    else:
        expected = rf"\[MIXKV-START-04\] {name} is no longer a setting.*Remove it"
        with pytest.raises(MixKVError, match=expected):
            resolve(None, {name: "auto"})
        assert not config_of(SimpleNamespace()).enabled  # who has not opted in is left alone
