"""Configuration, and the checks at start."""

from __future__ import annotations

import argparse
import pickle
from types import SimpleNamespace

import pytest

from sglang_mixkv import config
from sglang_mixkv import refusals as startup
from sglang_mixkv.config import Config, add_flags, config_of, resolve, truth
from sglang_mixkv.engine import releases as compat
from sglang_mixkv.engine.seams import Seam
from sglang_mixkv.errors import MixKVError


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


BOOLEANS: tuple[dict[str, object], tuple[str, ...]] = (
    {"1": True, "Yes": True, " on ": True, "n": False, "OFF": False}, ("maybe", "2", "-1"),
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
    assert str(refused.value).startswith(
        expected.format(setting.environ, setting.bounds.words, text)
    )
    if setting.flag and setting.field != "enabled":
        with pytest.raises(SystemExit):
            parse(f"{setting.flag}={text}")
        said = " ".join(capsys.readouterr().err.split())
        assert expected.format(setting.flag, setting.bounds.words, text) in said


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("SGLANG_MIXKV_STAGING", "SGLANG_MIXKV_STAGING_MB"),
        ("SGLANG_MIXKV_PATIENT", "SGLANG_MIXKV_PATIENCE"),
        ("SGLANG_ENABLE_MIX_KV", "SGLANG_ENABLE_MIXKV"),
    ],
)
def test_a_variable_that_is_misspelt_is_refused_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(MixKVError, match=f"MIXKV-START-04.* got {name}.* that is known is {meant}"):
        resolve(None, {name: "1"})


@pytest.mark.parametrize("service", ["SGLANG_MIXKV_ROUTER", "SGLANG_MIXKV"])
def test_what_kubernetes_says_of_a_service_is_no_setting(service: str) -> None:
    """But for one that is called sglang-mixkv, whose address has a setting's name."""
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "80",
        f"{service}_SERVICE_PORT_HTTP": "80",
        f"{service}_PORT": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP_PROTO": "tcp",
        f"{service}_PORT_80_TCP_PORT": "80",
        f"{service}_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    environ = {name: text for name, text in environ.items() if name != config.PORT_ENV}
    assert resolve(None, {**environ, config.API_KEY_ENV: "key", "PATH": "/bin"}) == Config()


def test_a_bad_variable_stops_nobody_who_has_not_opted_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.PATIENCE_ENV, "nan")
    assert config_of(SimpleNamespace()) == Config()
    monkeypatch.setenv(config.ENABLE_ENV, "1")
    with pytest.raises(MixKVError, match=config.PATIENCE_ENV):
        config_of(SimpleNamespace())


def test_the_record_travels_with_the_arguments_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does as the process that launched it, whatever its own environment."""
    record = resolve(parse("--enable-mixkv"), {config.PATIENCE_ENV: "2", config.PORT_ENV: "28000"})
    args = pickle.loads(pickle.dumps(SimpleNamespace(_mixkv=record)))
    monkeypatch.setenv(config.PATIENCE_ENV, "nan")
    monkeypatch.setenv(config.ENABLE_ENV, "0")
    found = config_of(args)
    assert (found, found.enabled, found.patience, found.port) == (record, True, 2.0, 28000)


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


def refused(args: SimpleNamespace, environ: dict[str, str]) -> list[str]:
    return startup.broken(startup.ARGUMENT_RULES, args, environ)


@pytest.mark.parametrize("algorithm", [None, "none", "EAGLE3", "NGRAM", "DFLASH", "dspark"])
def test_supported_combination_is_not_refused(algorithm: str | None) -> None:
    assert refused(arguments(speculative_algorithm=algorithm), {}) == []


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
    ({"attn_cp_size": 2}, "--attn-cp-size"),
]


@pytest.mark.parametrize(("changed", "name"), REFUSED)
def test_each_unsupported_choice_is_refused_by_name(changed: dict, name: str) -> None:
    (refusal,) = refused(arguments(**changed), {})
    assert name in refusal


def test_an_unsupported_variable_is_refused_by_name() -> None:
    (refusal,) = refused(arguments(), {"SGLANG_RUST_SERVER": "1"})
    assert "SGLANG_RUST_SERVER" in refusal


@pytest.mark.parametrize(
    "name", ["SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"]
)
def test_what_concerns_the_targets_kv_alone_is_served(name: str) -> None:
    assert refused(arguments(), {name: "1"}) == []


@pytest.mark.parametrize(("value", "is_mla"), [("1", True), ("1", False), ("0", True)])
def test_sglangs_staging_buffer_is_refused_with_an_mla_target(value: str, is_mla: bool) -> None:
    environ = {startup.STAGING_ENV: value}
    found = startup.broken((), arguments(), environ, lambda: is_mla)
    assert found == ([startup.STAGING] if is_mla and value == "1" else [])


@pytest.mark.parametrize("changed", [{"dcp_size": 2}, {"disaggregation_enable_kv_checksum": True}])
@pytest.mark.parametrize("backend", startup.BACKENDS)
def test_context_parallelism_and_sglangs_checksums_are_served(
    backend: str, changed: dict[str, object]
) -> None:
    assert refused(arguments(disaggregation_transfer_backend=backend, **changed), {}) == []


REMOVED = [(flag, variable) for flag, variable, _ in config.REMOVED]


@pytest.mark.parametrize(("flag", "variable"), REMOVED)
def test_a_removed_setting_stops_the_start_and_says_what_to_do(
    flag: str, variable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flag:
        with pytest.raises(SystemExit):
            parse(flag, "packed")
        assert f"{flag} is no longer a setting" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError, match=f"{variable} is no longer a setting.*Remove it"):
        resolve(None, {variable: "auto"})
    assert not config_of(SimpleNamespace()).enabled  # who has not opted in is left alone


def test_every_rule_has_a_test() -> None:
    hit = {refused(arguments(**changed), {})[0] for changed, _ in REFUSED}
    assert len(hit) == len(startup.ARGUMENT_RULES)


@pytest.mark.parametrize("changed", [changed for changed, _ in REFUSED[-6:]])
@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_without_a_drafter_caches_are_left_to_sglang(changed: dict, algorithm: str | None) -> None:
    assert refused(arguments(speculative_algorithm=algorithm, **changed), {}) == []


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1", "cpu"])
def test_a_supported_or_unset_device_is_not_refused(device: str | None) -> None:
    assert refused(arguments(device=device), {}) == []


@pytest.mark.parametrize("device", ["npu", "xpu", "hpu", "musa", "mps", "npu:0"])
def test_any_other_device_is_refused(device: str) -> None:
    (refusal,) = refused(arguments(device=device), {})
    assert "--device other than cuda and cpu" in refusal


def test_a_missing_seam_and_a_missing_parameter_are_named() -> None:
    def problem(name: str, *parameters: str) -> str | None:
        return compat.seam_problem(Seam(f"sglang_mixkv.config:{name}", "", parameters))

    assert "found none" in str(problem("gone"))
    assert "expected parameters ['other']; found ('name', 'environ')" in str(
        problem("truth", "name", "other")
    )
    assert problem("truth", "name") is None  # SGLang may have more


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK"])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_host_cache_is_served_with_a_drafter(mode: str, algorithm: str) -> None:
    chosen = {"disaggregation_mode": mode, "disaggregation_decode_enable_radix_cache": True}
    args = arguments(enable_hierarchical_cache=True, speculative_algorithm=algorithm, **chosen)
    assert refused(args, {}) == []


def test_storage_is_refused_at_run_time_where_it_is_at_start() -> None:
    args = arguments(hicache_storage_backend="file")
    assert startup.storage_refusal(arguments()) == refused(args, {})[0]
    assert startup.storage_refusal(arguments(speculative_algorithm="NGRAM")) is None


UNSERVED = {
    "Decode's radix cache with a drafter": {"disaggregation_decode_enable_radix_cache": True},
    "Hierarchical cache on decode with a drafter": {
        "enable_hierarchical_cache": True, "speculative_algorithm": "DSPARK",
        "disaggregation_decode_enable_radix_cache": True,
    },
    "`--dcp-size` above 1 with a drafter": {"dcp_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("feature", UNSERVED)
def test_what_a_release_does_not_serve_is_refused_there(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in compat.RELEASES:
        monkeypatch.setattr(compat, "sglang_version", lambda version=release.version: version)
        host_receive = {"disaggregation_decode_host_receive_threshold": release.no_host_receive}
        args = arguments(**UNSERVED[feature], **host_receive)
        found = startup.broken(compat.rules(), args, {})
        assert len(found) == (feature in release.unserved), release.version
        assert startup.broken(compat.rules(), arguments(**host_receive), {}) == []


@pytest.mark.parametrize(("version", "on"), [("0.5.21", 1), ("0.5.22", 0.9), ("0.5.23", 0)])
def test_host_receive_is_refused_where_it_is_on(
    version: str, on: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.21 has it on above 0, later releases below 1."""
    monkeypatch.setattr(compat, "sglang_version", lambda: version)
    args = arguments(disaggregation_decode_host_receive_threshold=on)
    (text,) = startup.broken(compat.rules(), args, {})
    assert text.startswith("--disaggregation-decode-host-receive-threshold other than")


def test_each_release_serves_all_or_says_what_not() -> None:
    everything = {feature for release in compat.RELEASES for feature in release.unserved}
    assert everything == set(UNSERVED)


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


def test_an_untested_release_has_the_rules_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "sglang_version", lambda: "99.0")
    assert compat.here() is compat.RELEASES[-1]
