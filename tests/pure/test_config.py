"""The configuration, and the checks of SGLang's arguments at start."""

from __future__ import annotations

import argparse
import pickle
from types import SimpleNamespace

import msgspec
import pytest

from sglang_mixkv import config, refusals
from sglang_mixkv.config import Config, add_flags, resolve
from sglang_mixkv.engine import releases
from sglang_mixkv.errors import MixKVError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)  # a second call must not raise
    return parser.parse_args(argv)


BOOLEANS: tuple[dict[str, object], tuple[str, ...]] = (
    {"1": True, "Yes": True, " on ": True, "y": True, "n": False, "OFF": False}, ("maybe", "-1"),
)  # fmt: skip
VALUES: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "enabled": BOOLEANS,
    "allow_untested_sglang": BOOLEANS,
    "staging_mb": ({"1": 1, " 64": 64, "16384": 16384}, ("0", "16385", "1.5", "64MB", "nan")),
    "on_draft_mismatch": ({"refuse": "refuse", "cold": "cold"}, ("warm", "Cold")),
    "patience": ({"0.1": 0.1, "6e1": 60.0}, ("0", "-1", "61", "nan", "inf", "1 s")),
    "port": ({"1024": 1024, "65000": 65000}, ("0", "1023", "65001", "tcp://10.0.0.1:80")),
    "data_plane": ({"mooncake": "mooncake", "nixl": "nixl"}, ("nixI", "NIXL", "mori")),
    "gpu_copies": (
        {"kernels": "kernels", "torch": "torch", "auto": "auto"}, ("triton", "Torch", "1"),
    ),
    "nixl_params": (
        {"{}": {}, '{"num_threads": "4"}': {"num_threads": "4"}}, ("{", "[]", '{"a": 4}', "a=b"),
    ),
}  # fmt: skip
"""Valid texts with their values, and invalid texts, by setting."""


def test_every_setting_has_bounds_and_a_default() -> None:
    assert set(VALUES) == {one.field for one in config.SETTINGS} == set(Config.__struct_fields__)
    assert resolve(None, {one.environ: " " for one in config.SETTINGS}) == Config()
    assert resolve(parse("--enable-mixkv"), {"SGLANG_ENABLE_MIXKV": "0"}).enabled


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda setting: setting.field)
def test_the_bounds_of_a_setting(
    setting: config.Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid value raises an error that names the setting and the expected value."""
    inside, outside = VALUES[setting.field]
    flag = "" if setting.field == "enabled" else setting.flag
    for text, value in inside.items():
        assert getattr(resolve(None, {setting.environ: text}), setting.field) == value
        if flag:
            assert getattr(resolve(parse(flag, text), {}), setting.field) == value
    for text in outside:
        expected = "[MIXKV-START-04] expected {} to be {}; got {!r}. As it is, "
        if setting.field == "nixl_params":
            expected = expected.replace("{!r}", "a value that may contain keys")
        with pytest.raises(MixKVError) as refused:
            resolve(None, {setting.environ: text})
        assert str(refused.value).startswith(expected.format(setting.environ, setting.words, text))
        if flag:
            with pytest.raises(SystemExit):
                parse(f"{flag}={text}")
            output = " ".join(capsys.readouterr().err.split())
            assert expected.format(flag, setting.words, text) in output


@pytest.mark.parametrize("service", ["SGLANG_MIXKV_ROUTER", "SGLANG_MIXKV"])
def test_kubernetes_service_variables_are_ignored(service: str) -> None:
    """Variables that Kubernetes sets for a service are not rejected as unknown settings.

    A service named sglang-mixkv also sets SGLANG_MIXKV_PORT, which is a setting's name. The test
    leaves that variable out.
    """
    ends = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP": "80",
            "PORT": "tcp://10.0.0.1:80", "PORT_80_TCP": "tcp://10.0.0.1:80",
            "PORT_80_TCP_PROTO": "tcp", "PORT_80_TCP_ADDR": "10.0.0.1"}  # fmt: skip
    environ = {f"{service}_{end}": text for end, text in ends.items()}
    environ.pop("SGLANG_MIXKV_PORT", None)
    assert resolve(None, {**environ, config.API_KEY_ENV: "key", "PATH": "/bin"}) == Config()
    with pytest.raises(MixKVError, match=r"START-04.*PATIENSE.*PATIENCE"):
        resolve(None, {"SGLANG_MIXKV_PATIENSE": "1"})


def arguments(**changed: object) -> SimpleNamespace:
    """Return the resolved arguments of a supported server."""
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
    ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "prefill_complete"),
    ({"enable_memory_saver": True, "disaggregation_transfer_backend": "nixl"},
     "--enable-memory-saver"),
    ({"speculative_algorithm": "UNO"}, "it has no draft KV to move"),
    ({"decoupled_spec_role": "drafter"}, "--decoupled-spec-role"),
    ({"device": "npu:0"}, "--device other"),
    ({"smg_grpc_mode": True, "grpc_mode": True}, "--smg-grpc-mode"),
    ({"grpc_mode": True}, "--smg-grpc-mode"),
    *(({flag[2:].replace("-", "_"): True}, flag) for flag in (
        "--use-ray", "--enable-pd-role-switch", "--enable-hisparse", "--enable-unified-memory",
        "--enable-kv-cache-sharding", "--enable-multi-layer-eagle",
        "--disaggregation-decode-draft-bootstrap")),
]  # fmt: skip


def test_an_error_names_who_set_a_flag() -> None:
    """An error asks the user to drop a flag only if the user gave that flag.

    SGLang sets some flags itself for some models.
    """
    given, resolved = arguments(), arguments(enable_multi_layer_eagle=True, use_ray=True)
    rules = refusals.ARGUMENT_RULES
    for raw, word in ((given, "sets it itself"), (resolved, "drop the flag")):
        words = refusals.broken(rules, resolved, {}, raw)
        assert word in next(text for text in words if "multi-layer" in text)
    assert refusals.broken(rules, given, {}, resolved) == []


WITH_A_DRAFTER = [
    ({"kv_canary": "log"}, "--kv-canary"),
    ({"hicache_storage_backend": "file"}, "--hicache-storage-backend other"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
]


def test_each_unsupported_flag_has_its_own_rule() -> None:
    hit = set[str]()
    for changed, name in (*REFUSED, *WITH_A_DRAFTER):
        (refusal,) = refused(arguments(**changed))
        assert name in refusal
        hit.add(refusal)
    assert len(hit) == len(refusals.ARGUMENT_RULES)
    (text,) = refused(arguments(), SGLANG_RUST_SERVER="1", SGLANG_MOONCAKE_CUSTOM_MEM_POOL="1")
    assert text.startswith("SGLANG_RUST_SERVER=1 ")
    assert refused(arguments(), SGLANG_RUST_SERVER="0") == []


HOST_CACHE = {"enable_hierarchical_cache": True, "disaggregation_decode_enable_radix_cache": True}
SERVED = [
    *({"disaggregation_mode": mode, **HOST_CACHE} for mode in ("prefill", "decode")),
    *({"disaggregation_transfer_backend": name} for name in refusals.BACKENDS),
    *({"device": device} for device in (None, "cuda:1", "cpu")),
    *({"speculative_algorithm": name} for name in ("NEXTN", "STANDALONE", "DFLASH", "dspark")),
    {"dcp_size": 2, "disaggregation_enable_kv_checksum": True},
    *({"attn_cp_size": size} for size in (None, 0, 1)),
    *({"hicache_storage_backend": name} for name in (None, "mooncake")),
    *({"kv_canary": canary} for canary in (None, "none")),
    {"decoupled_spec_role": "null"},
    {"radix_cache_backend": "lru"},
    {"radix_cache_backend": None},
    {"enable_memory_saver": True, "disaggregation_transfer_backend": "mooncake"},
    {"enable_memory_saver": False, "disaggregation_transfer_backend": "nixl"},
]


def test_supported_flags_are_not_refused() -> None:
    for changed in SERVED:
        assert refused(arguments(**changed)) == [], changed
    for changed, _ in WITH_A_DRAFTER:
        for algorithm in (None, "none", "NGRAM"):
            assert refused(arguments(**changed, speculative_algorithm=algorithm)) == [], changed


UNSERVED = {
    releases.RADIX_CACHE: {"disaggregation_decode_enable_radix_cache": True},
    releases.DCP: {"dcp_size": 2},
}


@pytest.mark.parametrize("release", [*releases.UNSERVED, "99.0"])
def test_features_that_a_release_lacks_are_refused(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature that a release lacks is refused on that release.

    An unknown release is treated as the newest one.
    """
    monkeypatch.setattr(releases, "sglang_version", lambda: release)
    refused_there = releases.UNSERVED.get(release, releases.UNSERVED["0.5.23"])
    off, on = (0, 1) if release == "0.5.21" else (1, 0.9)

    def broken(threshold: float, **changed: object) -> list[str]:
        changed["disaggregation_decode_host_receive_threshold"] = threshold
        return refusals.broken(releases.rules(), arguments(**changed), {})

    assert broken(off) == []
    assert broken(off, dcp_size=1, disaggregation_decode_enable_radix_cache=False) == []
    for rule, changed in UNSERVED.items():
        assert broken(off, **changed) == [str(rule)] * (rule in refused_there)
    (text,) = broken(on)
    assert text.startswith("--disaggregation-decode-host-receive-threshold ")
    assert set(refused_there[1:]) <= set(UNSERVED)


def test_the_configuration_survives_pickling() -> None:
    """The attached configuration survives pickling without a reference to the plugin.

    SGLang pickles its ServerArgs, and unpickles dumps of them where the plugin is not installed.
    """
    given = {
        "enabled": True, "staging_mb": 3, "on_draft_mismatch": "cold", "patience": 0.5,
        "allow_untested_sglang": True, "port": 2000, "data_plane": "nixl",
        "gpu_copies": "torch", "nixl_params": {"a": "b"},
    }  # fmt: skip
    assert set(given) == set(config.Config.__struct_fields__)
    args = SimpleNamespace()
    config.attach(args, config.Config(**given))
    text = pickle.dumps(args)
    assert b"sglang_mixkv" not in text
    assert msgspec.structs.asdict(config.config_of(pickle.loads(text))) == given
    config.attach(stock := SimpleNamespace(), config.Config())
    assert not vars(stock), "a disabled plugin must not change SGLang's arguments"
