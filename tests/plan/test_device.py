# SPDX-License-Identifier: Apache-2.0
"""Devices and bytes as people write them."""

from __future__ import annotations

import pytest

from sparse_rl.plan import Device
from sparse_rl.plan.device import choose_device, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("80 gb", 80 * 10**9), ("1.5GiB", 3 * 2**29), ("1000000", 10**6), ("2e9", 2 * 10**9)],
)
def test_bytes_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "80 GBs", "-3", "0", "1.2.3GB", "many"])
def test_bytes_nobody_can_read(text):
    with pytest.raises(ValueError, match="--memory is"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["80", "999999", "80kB"])
def test_a_unit_that_was_forgotten(text):
    with pytest.raises(ValueError, match=f"--memory is '{text}', .* bytes, which no GPU has; write a unit"):
        parse_bytes(text)


def test_devices():
    assert choose_device("cpu", memory="24GB") == Device(name="a GPU of 24.0 GB", memory=24 * 10**9)
    assert not choose_device("cpu").cuda
    with pytest.raises(ValueError, match="did you mean 'h200'"):
        choose_device("cpu", gpu="h20")
    with pytest.raises(ValueError, match="leave one out"):
        choose_device("cpu", gpu="h200", memory="1GB")
    with pytest.raises(ValueError, match="--gpu NAME"):
        choose_device("cuda:99")
