"""The promises of the campaign over real Ray and NIXL, with few faults; `RDT_THOROUGH=1 pytest tests/faults --ray-faults N`."""

from __future__ import annotations

import pytest

from rdt_testbed.faults.overray import RayCampaign

pytestmark = [pytest.mark.integration, pytest.mark.thorough, pytest.mark.timeout(0)]


@pytest.mark.parametrize(("kind", "mode"), [("mapped", "live"), ("prepared", "snapshot"), ("ray", "bucket")])
def test_no_promise_is_broken(ray_cluster, kind, mode, request):
    seed = f"{request.config.getoption('--seed')} {kind}"
    campaign = RayCampaign(f"faults-{kind}", kind, mode, seed)
    try:
        campaign.start()
        for _ in range(request.config.getoption("--ray-faults")):
            print(campaign.fault(), flush=True)
        assert campaign.checked
    finally:
        campaign.end()
