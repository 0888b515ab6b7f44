"""Command lines and environments of the servers that the demo and the end-to-end tests start."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import mixkv_cpu
from mixkv_demo import one_gpu
from mixkv_demo.pair import model_flags
from mixkv_demo.ports import free_port
from sglang_mixkv.config import ENABLE_ENV, PATIENCE_ENV

HOST = "127.0.0.1"
DEVICES = ("cpu", "cuda")
METRICS = "--enable-metrics"

PATIENCE = "5"
"""Servers on the CPU engine share few cores. Longer time limits keep drafters from going cold."""


@dataclass(frozen=True)
class Topology:
    """The flags of a prefill and a decode server, in addition to those that both share.

    ``mixkv_*``: the plugin flags of that side; empty for a stock server. ``speculative``: False
    leaves the drafter out on both sides. ``backend``: SGLang's transfer backend. ``device``: the
    device of both sides, one of DEVICES. ``spawn``: start ranks as on GPUs (mixkv_cpu.SPAWN_ENV).
    ``env``: more variables for both sides.
    """

    prefill: tuple[str, ...] = ("--tp", "2")
    decode: tuple[str, ...] = ("--tp", "1")
    mixkv_prefill: tuple[str, ...] = ()
    mixkv_decode: tuple[str, ...] = ()
    speculative: bool = True
    backend: str = "mooncake"
    device: str = "cpu"
    spawn: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Launch:
    """One server to start: its name, command, environment and port."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def ranks(flags: Sequence[str]) -> int:
    """Return how many scheduler processes a server with these flags has."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pp", "--pp-size", "--pipeline-parallel-size", type=int, default=1)
    known, _ = parser.parse_known_args(list(flags))
    return int(known.tp * known.pp)


def local_env() -> dict[str, str]:
    """Return variables: no proxy for local addresses, no Hub, no compiler, no plugin by default."""
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        ENABLE_ENV: "0",
    }


def _idle_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Return the flag with which idle schedulers sleep, so that the busy ones get the cores.

    With DP attention, return none: ranks step together, and a sleeping one would delay the others.
    """
    dp_attention = {"--attn-dp-size", "--enable-dp-attention"} & set(flags)
    return () if dp_attention else ("--sleep-on-idle",)


def server(
    name: str,
    pair: str,
    flags: Sequence[str],
    extra_env: Mapping[str, str] | None = None,
    speculative: bool = True,
    device: str = "cpu",
) -> Launch:
    """Make a ``sglang.launch_server`` with the models of a pair, on the CPU engine or on GPUs."""
    port = free_port()
    address = ("--host", HOST, "--port", str(port))
    models = model_flags(pair, speculative)
    command = (sys.executable, "-m", "sglang.launch_server", *address, *models)
    engine_env, engine_flags = mixkv_cpu.launch_env(ranks(flags)), mixkv_cpu.LAUNCH_FLAGS
    if device == "cuda":
        gpu = one_gpu.setup(one_gpu.cards())
        engine_env, engine_flags = {**mixkv_cpu.LOOPBACK_ENV, **gpu.env}, gpu.flags
    env = {**local_env(), **engine_env, **(extra_env or {})}
    return Launch(name, (*command, *engine_flags, *_idle_flags(flags), *flags), env, port)


def _disaggregation(mode: str, backend: str, bootstrap_port: int) -> tuple[str, ...]:
    return (
        *("--disaggregation-mode", mode),
        *("--disaggregation-transfer-backend", backend),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    )


def prefill_and_decode(pair: str, topology: Topology) -> tuple[Launch, Launch, int]:
    """Return both servers of a disaggregated pair, with metrics, and prefill's bootstrap port."""
    bootstrap, spawn = free_port(), str(int(topology.spawn))
    patience = os.environ.get(PATIENCE_ENV, PATIENCE)
    env = {PATIENCE_ENV: patience, mixkv_cpu.SPAWN_ENV: spawn, **topology.env}
    backend, device = topology.backend, topology.device
    prefill_flags = (
        *_disaggregation("prefill", backend, bootstrap), METRICS,
        *topology.prefill, *topology.mixkv_prefill,
    )  # fmt: skip
    decode_flags = (
        *_disaggregation("decode", backend, bootstrap), METRICS,
        *topology.decode, *topology.mixkv_decode,
    )  # fmt: skip
    speculative = topology.speculative
    prefill = server("prefill", pair, prefill_flags, env, speculative, device)
    decode = server("decode", pair, decode_flags, env, speculative, device)
    return prefill, decode, bootstrap


def without_drafter(server: Launch) -> Launch:
    """Return the same server without speculation."""
    words = list(server.argv)
    while found := [word for word in words if word.startswith("--speculative-")]:
        start = words.index(found[0])
        del words[start : start + 2]
    return replace(server, argv=tuple(words))


def run_by(server: Launch, script: Path, env: Mapping[str, str] | None = None) -> Launch:
    """Return the same server, started by a script that patches SGLang."""
    words = list(server.argv)
    start = words.index("-m")
    words[start : start + 2] = [str(script)]
    return replace(server, argv=tuple(words), env={**server.env, **(env or {})})


PASS_THROUGH = ("--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker")


def router(
    prefill: Launch,
    decode: Launch,
    bootstrap_port: int,
    *others: tuple[Launch, int],
    module: Sequence[str] = ("sglang_router.launch_router",),
    flags: Sequence[str] = PASS_THROUGH,
) -> Launch:
    """Make SGLang's own router in PD mode. By default, it uses prefill servers in turn, and returns
    errors instead of retrying. `others`: more prefill servers with their bootstrap ports."""
    port = free_port()
    prefills = [(prefill, bootstrap_port), *others]
    addresses = [word for one, room in prefills for word in ("--prefill", one.url, str(room))]
    command = (
        *(sys.executable, "-m", *module, "--pd-disaggregation"),
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())),
        *(*addresses, "--decode", decode.url),
        *("--worker-startup-check-interval", "1", *flags),
    )
    return Launch("router", command, local_env(), port)
