"""Configuration, and the checks at start."""

from __future__ import annotations

import argparse
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sglang_mixkv import refusals as startup
from sglang_mixkv.config import Config, add_flags, config_of, resolve, truth
from sglang_mixkv.engine import releases as compat


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    add_flags(parser)  # a second time is no error
    return parser.parse_args(argv)


def test_flag_over_environment_over_default() -> None:
    assert not resolve(parse(), {}).enabled
    assert resolve(parse(), {"SGLANG_ENABLE_MIXKV": "1"}).enabled
    assert resolve(parse("--enable-mixkv"), {"SGLANG_ENABLE_MIXKV": "0"}).enabled
    assert resolve(None, {"SGLANG_ENABLE_MIXKV": "true"}).enabled


@pytest.mark.parametrize(("text", "means"), [("y", True), ("yes", True), ("n", False), ("", False)])
def test_booleans_are_read_as_sglang_reads_them(text: str, means: bool) -> None:
    assert truth("SGLANG_ENABLE_MIXKV", {"SGLANG_ENABLE_MIXKV": text}) == means


def test_unclear_environment_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected one of"):
        truth("SGLANG_ENABLE_MIXKV", {"SGLANG_ENABLE_MIXKV": "maybe"})


def test_record_travels_with_the_arguments() -> None:
    args = SimpleNamespace(_mixkv=Config(enabled=True))
    assert config_of(pickle.loads(pickle.dumps(args))).enabled


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


@pytest.mark.parametrize("algorithm", [None, "none", "EAGLE3", "NGRAM", "DFLASH", "dspark"])
def test_supported_combination_is_not_refused(algorithm: str | None) -> None:
    assert startup.refusals(arguments(speculative_algorithm=algorithm), {}) == []


REFUSED = [
    ({"disaggregation_mode": "null"}, "--disaggregation-mode"),
    ({"disaggregation_transfer_backend": "mori"}, "mooncake"),
    ({"use_ray": True}, "--use-ray"),
    ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
    ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "prefill_complete"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"disaggregation_decode_host_receive_threshold": 0.5}, "host-receive"),
    ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
    ({"kv_canary": "log"}, "--kv-canary"),
    ({"speculative_algorithm": "UNO"}, "it has no draft KV that could be moved"),
    ({"speculative_algorithm": "FROZEN_KV_MTP"}, "it has no draft KV that could be moved"),
    ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
    ({"decoupled_spec_role": "drafter"}, "--decoupled-spec-role"),
    ({"device": "npu"}, "--device"),
    ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
    ({"enable_lmcache": True}, "--enable-lmcache"),
    ({"enable_flexkv": True}, "--enable-flexkv"),
    ({"radix_cache_backend": "flexkv"}, "--radix-cache-backend"),
    ({"enable_unified_cache_external_linker": True}, "--enable-unified-cache-external-linker"),
    ({"dcp_size": 2, "disaggregation_transfer_backend": "nixl"}, "--dcp-size"),
    ({"attn_cp_size": 2}, "--attn-cp-size"),
]


@pytest.mark.parametrize(("changed", "name"), REFUSED)
def test_each_unsupported_choice_is_refused_by_name(changed: dict, name: str) -> None:
    (refusal,) = startup.refusals(arguments(**changed), {})
    assert name in refusal


@pytest.mark.parametrize(
    "environ",
    [
        {"SGLANG_RUST_SERVER": "1"},
        {"SGLANG_DISAGG_STAGING_BUFFER": "true"},
    ],
)
def test_each_unsupported_variable_is_refused_by_name(environ: dict[str, str]) -> None:
    (refusal,) = startup.refusals(arguments(), environ)
    assert next(iter(environ)) in refusal


def test_staging_is_refused_without_a_drafter_too() -> None:
    """Its messages would be dropped, and each request end at a timeout."""
    (refusal,) = startup.refusals(
        arguments(speculative_algorithm=None), {"SGLANG_DISAGG_STAGING_BUFFER": "1"}
    )
    assert "its messages do not pass" in refusal


def test_staging_goes_with_the_draft_channel() -> None:
    """It has the target's KV alone there, and its messages are nobody's but SGLang's."""
    both = {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_MIXKV_CHANNEL": "1"}
    assert startup.refusals(arguments(), both) == []


def test_cold_does_not_go_with_sglangs_checksums() -> None:
    compared = arguments(disaggregation_enable_kv_checksum=True)
    cold = Config(on_draft_mismatch="cold")
    assert startup.refusals(compared, {}) == []
    (refusal,) = startup.refusals(compared, {}, cold)
    assert "compare draft KV that was not sent" in refusal


@pytest.mark.parametrize("kind", ["True", "NVLINK", "BAREX", "INTRA_NODE_NVLINK"])
def test_a_custom_memory_pool_goes_with_all_but_cold(kind: str) -> None:
    pool, cold = {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": kind}, Config(on_draft_mismatch="cold")
    for other in ("auto", "packed", "direct"):
        assert startup.refusals(arguments(), pool, Config(draft_transfer=other)) == []
    (refusal,) = startup.refusals(arguments(), pool, cold)
    assert "which NVLink does not reach" in refusal
    for none in ({}, {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "0"}):
        assert startup.refusals(arguments(), none, cold) == []


def test_every_rule_has_a_test() -> None:
    hit = {startup.refusals(arguments(**changed), {})[0] for changed, _ in REFUSED}
    assert len(hit) == len(startup.ARGUMENT_RULES)


@pytest.mark.parametrize("changed", [changed for changed, _ in REFUSED[-7:]])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_without_a_drafter_caches_are_left_to_sglang(changed: dict, algorithm: str | None) -> None:
    assert startup.refusals(arguments(speculative_algorithm=algorithm, **changed), {}) == []


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1", "cpu"])
def test_a_supported_or_unset_device_is_not_refused(device: str | None) -> None:
    assert startup.refusals(arguments(device=device), {}) == []


@pytest.mark.parametrize("device", ["npu", "xpu", "hpu", "musa", "mps", "npu:0"])
def test_any_other_device_is_refused(device: str) -> None:
    (refusal,) = startup.refusals(arguments(device=device), {})
    assert "--device other than cuda and cpu" in refusal


@pytest.mark.parametrize("flag", ["dcp_size", "attn_cp_size"])
def test_checksums_with_context_parallelism_are_refused_by_name(flag: str) -> None:
    """Without a drafter, too: no request could be compared, and each would fail."""
    args, name = arguments(**{flag: 2}, speculative_algorithm=None), flag.replace("_", "-")
    (refusal,) = startup.refusals(args, {}, Config(verify="checksum"))
    assert f"--mixkv-verify checksum with --{name} above 1 is not supported" in refusal
    assert startup.refusals(args, {}, Config()) == []


def test_missing_and_changed_seams_are_named() -> None:
    assert "found none" in str(compat.seam_problem("sglang_mixkv.config:gone", ()))
    assert "found ('name', 'environ')" in str(
        compat.seam_problem("sglang_mixkv.config:truth", ("name",))
    )
    assert compat.seam_problem("sglang_mixkv.config:truth", ("name", "environ")) is None


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_host_cache_is_served_with_a_drafter(mode: str, algorithm: str) -> None:
    chosen = {"disaggregation_mode": mode, "disaggregation_decode_enable_radix_cache": True}
    args = arguments(enable_hierarchical_cache=True, speculative_algorithm=algorithm, **chosen)
    assert startup.refusals(args, {}) == []


def test_storage_is_refused_at_run_time_where_it_is_at_start() -> None:
    args = arguments(hicache_storage_backend="file")
    assert startup.storage_refusal(arguments()) == startup.refusals(args, {})[0]
    assert startup.storage_refusal(arguments(speculative_algorithm="NGRAM")) is None


UNSERVED = {
    "Hierarchical cache with a drafter": {"enable_hierarchical_cache": True},
    "Decode's radix cache with a drafter": {"disaggregation_decode_enable_radix_cache": True},
    "SGLang's checksums": {"disaggregation_enable_kv_checksum": True},
    "NIXL": {"disaggregation_transfer_backend": "nixl"},
    "DFLASH, DSPARK": {"speculative_algorithm": "DSPARK"},
    "`--dcp-size` above 1 with a drafter": {"dcp_size": 2},
}


@pytest.mark.parametrize("feature", UNSERVED)
def test_what_a_release_does_not_serve_is_refused_there(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(**UNSERVED[feature])
    for release in compat.RELEASES:
        monkeypatch.setattr(compat, "sglang_version", lambda version=release.version: version)
        found = startup.broken(compat.rules(), args, {}, None)
        assert len(found) == (feature in release.unserved), release.version
        assert all(f"with SGLang {release.version} is not supported" in text for text in found)


def test_each_release_serves_all_or_says_what_not() -> None:
    everything = {feature for release in compat.RELEASES for feature in release.unserved}
    assert everything == set(UNSERVED)
    for release in compat.RELEASES:
        refused = {feature.lower() for feature in release.unserved}
        assert set(startup.BACKENDS) - release.framings.keys() <= refused


def test_the_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release is asked for with each request."""
    read: list[str] = []
    monkeypatch.setattr("importlib.metadata.version", lambda name: read.append(name) or "0.5.23")
    compat.sglang_version.cache_clear()
    try:
        assert {compat.here().version for _ in range(3)} == {"0.5.23"}
    finally:
        compat.sglang_version.cache_clear()
    assert read == ["sglang"]


def test_untested_version_stops_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "9.9.9")
    monkeypatch.setattr(compat, "RELEASES", (replace(compat.RELEASES[-1], seams={}),))
    with pytest.raises(SystemExit, match=r"expected one of .*0\.5\.23.*found 9\.9\.9"):
        compat.preflight(Config(enabled=True))
    compat.preflight(Config(enabled=True, allow_untested_sglang=True))
