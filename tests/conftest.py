"""For all tests: a torchvision whose library does not load must not keep transformers from being imported, and what a test
switches on in PyTorch is as before afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from steptime._capture.vision_ops import declared_when_imported
from steptime._cli import output

declared_when_imported()
# On a busy machine a test may take as long as a command that says it is still at work.
output.LINE_EVERY_S = 1e6


# Half a minute or more each, and guarded by smaller tests beside them: `make test-long` runs these.
LONGEST = (
    "test_calibrating_as_a_user_does_helps_on_a_visit_that_nothing_was_fitted_to",
    "test_every_job_measures_with_torch_numpy_and_pyarrow_alone[steps]",
    "test_every_job_measures_with_torch_numpy_and_pyarrow_alone[sharding]",
    "test_every_job_measures_with_torch_numpy_and_pyarrow_alone[memory]",
    "test_every_block_of_a_page_runs[docs/plan.md]",
    "test_every_block_of_a_page_runs[docs/accuracy.md]",
    "test_every_block_of_a_page_runs[docs/tutorials/script.md]",
    "test_validate_kernels_says_the_same_to_programs_and_its_families_are_within_reason",
    "test_a_run_that_is_cut_off_loses_nothing_and_goes_on[9]",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what takes longest before tests are chosen by their marks."""
    for item in items:
        if item.name in LONGEST:
            item.add_marker("long")


@pytest.fixture(autouse=True)
def switches_as_before() -> Iterator[None]:
    """Of tests that run after PyTorch was imported."""
    if "torch" not in sys.modules:
        yield
        return
    from steptime._capture.switches import restored

    with restored():
        yield
