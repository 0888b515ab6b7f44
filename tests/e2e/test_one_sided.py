"""mixkv on one side only: a request ends with an error that names the plugin, in time."""

from __future__ import annotations

import pytest

from sglang_mixkv.demo.launch import Topology
from sglang_mixkv.demo.pair import prompts
from sglang_mixkv.demo.processes import Fleet
from sglang_mixkv.demo.servers import disaggregated
from sglang_mixkv.tools.client import RequestFailed

from .conftest import ENABLE, START_TIMEOUT, TP1, TP2

pytestmark = [START_TIMEOUT, pytest.mark.full]

SIDES = [
    pytest.param(Topology(TP2, TP1, mixkv_prefill=ENABLE), id="decode-lacks-it"),
    pytest.param(Topology(TP2, TP1, mixkv_decode=ENABLE), id="prefill-lacks-it"),
]


@pytest.mark.parametrize("topology", SIDES)
def test_the_error_names_the_plugin(topology: Topology) -> None:
    with Fleet() as fleet:
        deployment = disaggregated(fleet, "mla", topology)
        with pytest.raises(RequestFailed, match="does not run sglang-mixkv"):
            deployment.ask(prompts()[0])
