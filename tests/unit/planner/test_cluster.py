"""Devices and clusters: the catalogue, and files of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.planner.cluster import Cluster, catalogue, load_catalogue

OWN = """
[devices.mine]
names = ["My Card"]
memory_gb = 10.0
memory_gb_s = 500.0
tflops = { bf16 = 50.0 }
best_matmul = { bf16 = 0.8 }
attention = { flash = 20.0, vendor = 25.0 }
units = 40
watts = 200
link_gb_s = 10.0
network_gb_s = 1.0
source = "measured"

[clusters.two-hosts]
device = "mine"
hosts = 2
devices_per_host = 4
network_gb_s = 1.25
source = "measured"
"""


def test_every_device_is_plausible_and_has_a_source() -> None:
    known = catalogue()
    assert {"a100-80gb", "h100", "h200", "b200", "gb200", "mi300x", "tpu-v5p", "rtx-4090"} <= known.devices.keys()
    for name, device in known.devices.items():
        assert device.source, name
        assert 8e9 <= device.memory <= 400e9, name
        assert 0.4e12 <= device.memory_bandwidth <= 10e12, name
        assert 50e12 <= device.peak["bf16"] <= 5e15, name
        assert all(0.3 <= share <= 1.0 for share in device.best_matmul.values()), name
        assert all(rate < device.peak["bf16"] for rate in device.attention.values()), name
        assert device.link < device.memory_bandwidth, name


def test_devices_are_found_by_what_torch_calls_them() -> None:
    assert catalogue().device("NVIDIA H100 80GB HBM3").name == "h100"
    assert catalogue().device("a100").name == "a100-80gb"
    assert catalogue().cluster("h100x8-ib", hosts=4).devices == 32


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"called 'h10'\. Did you mean 'h100'\?"):
        catalogue().device("h10")
    with pytest.raises(PlanError, match="h100x8-ib"):
        catalogue().cluster("h100x8-lb")


def test_a_file_of_ones_own_adds_to_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    both = load_catalogue(path, base=catalogue())
    assert both.cluster("two-hosts").devices == 8
    assert both.device("my card").memory == 10e9
    assert both.device("h100") is catalogue().device("h100")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("memory_gb = 10.0\n", "", r"devices.mine\] lacks 'memory_gb'"),
        ('device = "mine"', 'device = "yours"', r"clusters.two-hosts\] lacks 'yours'"),
        ("units = 40", 'units = "many"', "not understood"),
        ("[devices.mine]", "[device.mine]", "table 'device'"),
        ("hosts = 2", "hosts = 0", "hosts is 0; give a number above 0"),
        ("hosts = 2", "hosts = 1.5", "give a whole number"),
        ("network_gb_s = 1.25", "network_gb_s = 0.0", "above 0"),
        ("tflops = { bf16 = 50.0 }", "tflops = 50.0", "not understood"),
        ("tflops = { bf16 = 50.0 }", "tflops = { fp16 = 50.0 }", "lacks 'bf16'"),
        ("best_matmul = { bf16 = 0.8 }", "best_matmul = { bf16 = 80 }", "at most 1"),
        ("memory_gb = 10.0", "memory_gb = -1", "memory_gb is -1; give a number above 0"),
        ("watts = 200", "wats = 200", "'wats' is not known. Did you mean 'watts'"),
    ],
)
def test_a_mistake_in_it_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises(PlanError, match=says):
        load_catalogue(path)


def test_a_job_may_use_a_part_of_a_host_or_several() -> None:
    device = catalogue().device("h100")
    assert Cluster.of(device, 4, devices_per_host=8).devices_per_host == 4
    assert Cluster.of(device, 20, devices_per_host=8).hosts == 3
