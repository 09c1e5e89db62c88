from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nbdist.errors import PlanError
from nbdist.hardware.discovery import Gpu, GpuFreeMemory, Machine
from nbdist.planner import cluster_spec, gpu_catalog
from nbdist.planner.target_devices import parse_devices

GIB = 1 << 30
GB = 1e9


def gpu(name: str = "NVIDIA H100 80GB HBM3", gib: float = 79.1, uuid: str = "GPU-0") -> Gpu:
    return Gpu(uuid=uuid, name=name, memory_bytes=int(gib * GIB), capability=(9, 0))


# ---------------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "name", "link"),
    [
        ("8xH100-80GB,nvlink", 8, 1, "H100-80GB", "nvlink"),
        ("8xH100-80GB", 8, 1, "H100-80GB", "nvlink"),
        ("8xH100-80GB,pcie", 8, 1, "H100-80GB", "pcie"),
        ("H100", 1, 1, "H100-80GB", "none"),
        ("4xA100-40GB", 4, 1, "A100-40GB", "nvlink"),
        ("2x4090", 2, 1, "RTX4090-24GB", "pcie"),
        ("2 x RTX 4090, PCIe", 2, 1, "RTX4090-24GB", "pcie"),
        ("2x3090,nvlink", 2, 1, "RTX3090-24GB", "nvlink"),
        ("16x8xA100-80GB,nvlink,400Gb", 128, 16, "A100-80GB", "nvlink"),
        ("4xRTX PRO 6000", 4, 1, "RTXPRO6000-96GB", "pcie"),
        ("2x(8xH100-80GB,nvlink),400Gb/s", 16, 2, "H100-80GB", "nvlink"),
        ("3 x (4xA100-40GB, pcie), 8x200Gb", 12, 3, "A100-40GB", "pcie"),
        ("4x(RTX 4090),100Gbps", 4, 4, "RTX4090-24GB", "none"),
        ("1x(2x4090)", 2, 1, "RTX4090-24GB", "pcie"),
    ],
)
def test_words_name_devices(text: str, ranks: int, nodes: int, name: str, link: str) -> None:
    cluster = parse_devices(text)
    assert (cluster.world_size, cluster.num_nodes, cluster.link) == (ranks, nodes, link)
    assert {device.name for device in cluster.devices} == {name}
    assert cluster.notes == ()


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA B200", "B200-180GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090-24GB"),
        ("NVIDIA RTX A6000", "A6000-48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000-96GB"),
        ("NVIDIA TITAN RTX", "TitanRTX-24GB"),
    ],
)
def test_driver_names_are_known(driver: str, name: str) -> None:
    known = gpu_catalog.GPU_CATALOG[name]
    found = gpu_catalog.find_gpu(driver, memory_bytes=known.memory_bytes)
    assert found is known


def test_memory_alone_names_a_typical_gpu_and_says_so() -> None:
    cluster = parse_devices("4x80GB")
    assert cluster.smallest_device.memory_bytes == pytest.approx(80 * GIB, rel=0.02)
    assert cluster.smallest_device.memory_bytes < 80 * GIB
    assert cluster.notes == ("80 GB does not name a GPU: assuming the speeds of A100-80GB.",)


def test_network_is_of_a_node_and_adapters_add_up() -> None:
    assert parse_devices("2x8xH100,400Gb").network_bandwidth == 50 * GB
    assert parse_devices("2x8xH100,8x400Gb").network_bandwidth == 400 * GB
    assert parse_devices("2x8xH100,8x400Gb").notes == ()
    assumed = parse_devices("2x8xH100")
    assert assumed.network_bandwidth == 50 * GB
    assert assumed.notes == ("No network given: assuming 400 Gb/s into each node.",)


def test_a_machine_in_brackets_says_what_the_short_form_says() -> None:
    for short, long in (
        ("2x8xH100,nvlink,400Gb", "2x(8xH100,nvlink),400Gb/s"),
        ("4x8xA100-80GB,pcie,8x200Gb", "4x(8xA100-80GB,pcie),8x200Gb/s"),
        ("2x8xH100,400Gb,1TB host,2TB nvme", "2x(8xH100,1TB host),400Gb/s,2TB nvme"),
        ("2x8x80GB", "2x(8x80GB)"),
    ):
        assert parse_devices(short) == parse_devices(long)
    assert (
        parse_devices("2x(8xH100,nvlink),400Gb/s").describe()
        == "2 x (8 x H100-80GB, nvlink), 400 Gb/s"
    )
    assert parse_devices("2x(8xH100)").notes == parse_devices("2x8xH100").notes != ()


def test_host_and_nvme_are_read() -> None:
    cluster = parse_devices("8xH100,nvlink,2TB host,4TB nvme")
    assert (cluster.host_memory_bytes, cluster.nvme_bytes) == (2e12, 4e12)
    assert parse_devices("8xH100").host_memory_bytes is None


@pytest.mark.parametrize(("text", "count"), [("cpu", 1), ("2xcpu", 2), ("4 cpus", 4)])
def test_cpu_ranks(text: str, count: int) -> None:
    cluster = parse_devices(text)
    assert cluster.kind == "cpu"
    assert cluster.world_size == count
    assert cluster.link == ("none" if count == 1 else "cpu")
    assert "assuming 8 GiB per rank" in cluster.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "No GPU named"),
        ("8x", "No GPU named"),
        (",nvlink", "No GPU named"),
        ("0xH100", "must be an integer >= 1, got 0 in '0xH100'"),
        ("-1xH100", "must be an integer >= 1, got -1"),
        ("1.5xH100", "must be an integer >= 1, got 1.5"),
        ("0xcpu", "must be an integer >= 1, got 0"),
        ("999999xH100", "At most 100000"),
        ("2xnanGB", "Invalid size nan"),
        ("2xinfGB", "Invalid size inf"),
        ("2x0GB", "Invalid size 0"),
        ("2x-5GB", "Invalid size -5"),
        ("2x99999999GB", "No GPU has 1e+08 GB"),
        ("2x8xH100,0Gb", "Invalid size 0"),
        ("8xH100,400Gb/s", "Network 400Gb/s needs several machines"),
        ("8xH100,nvlnk", "Did you mean nvlink?"),
        ("8xH100,foo", "nvlink or pcie"),
        ("2x4090,nvlink", "RTX4090-24GB has no NVLink. Use pcie"),
        ("H100-81GB", "Known: H100-80GB"),
        ("4xH10O", "Did you mean H100-80GB"),
        ("zzz", "its memory, as in 2x24GB"),
        ("2xcpu,nvlink", "CPU ranks do not take 'nvlink'"),
        ("2x4x8xH100", "2x4x8xH100 has three numbers. Give the number of machines and"),
        ("2x8xH100,nvlink,50GB/s", "Give a network in bits, as in 400Gb/s"),
        ("2x(8xH100", "put one machine in brackets"),
        ("(8xH100)", "the number of machines before them"),
        ("2x()", "put one machine in brackets"),
        ("2x(8xH100)400Gb/s", "the network after them. Example: 2x(8xH100-80GB,nvlink),400Gb/s"),
        ("2x((8xH100))", "put one machine in brackets"),
        ("0x(8xH100)", "must be an integer >= 1, got 0"),
        ("2x(2x8xH100),400Gb/s", "2x8xH100 in the brackets is more than one machine"),
        ("2x(8xH100,400Gb/s)", "400Gb/s connects machines; put it after the brackets"),
        ("2x(8xH100),nvlink,400Gb/s", "nvlink is a link inside a machine; put it in the brackets"),
        ("802802802xcpu", "At most 100000"),
        ("2 nodes x 8xH100", "Write several machines as 2x(8xH100-80GB,nvlink),400Gb/s"),
        ("2x(4xcpu)", "CPU ranks are planned for one machine only; use 4xcpu"),
        ("9999x(99xH100)", "989901. At most 100000"),
        ("2x(8xH10O),400Gb/s", "Did you mean H100-80GB"),
    ],
)
@pytest.mark.fault("F6")
def test_bad_words_are_answered_in_a_sentence(text: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_devices(text)
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_long_nonsense_is_cut() -> None:
    with pytest.raises(PlanError) as caught:
        parse_devices("x" * 5000)
    assert len(str(caught.value)) < 200


# ------------------------------------------------------------------------- catalogue


def test_every_row_has_a_source_and_is_read_by_its_own_name() -> None:
    for name, device in gpu_catalog.GPU_CATALOG.items():
        assert device.source
        assert parse_devices(f"2x{name}").devices[0] is device


@pytest.mark.parametrize("device", gpu_catalog.GPU_CATALOG.values(), ids=lambda one: one.name)
def test_figures_are_plausible(device: cluster_spec.DeviceSpec) -> None:
    named = int(device.name.rsplit("-", 1)[1].removesuffix("GB"))
    assert 0.89 * named * GIB < device.memory_bytes <= named * GIB
    assert 1e12 < device.peak_flops("no") < device.peak_flops("fp16") < 3e15
    assert device.sustained_flops("fp16") < device.peak_flops("fp16")
    assert 3e11 <= device.memory_bandwidth <= 1e13
    assert device.has_nvswitch <= (device.nvlink > 0)


def test_a_type_that_a_gpu_lacks_runs_at_fp32_speed() -> None:
    turing = gpu_catalog.GPU_CATALOG["T4-16GB"]
    assert not turing.has_bf16
    assert turing.peak_flops("bf16") == turing.peak_flops("no") == 8.1e12


# ----------------------------------------------------------------------------- links


def test_links_reach_what_nccl_tests_measured() -> None:
    # stas00/ml-engineering, network/benchmarks: bus bandwidth at 1 GiB and more.
    assert parse_devices("8xA100").link_bytes_per_s("all_reduce") == pytest.approx(235e9, rel=0.05)
    assert parse_devices("8xH200").link_bytes_per_s("all_gather") == pytest.approx(361e9, rel=0.05)
    assert parse_devices("8xH200").link_bytes_per_s("all_reduce") == pytest.approx(475e9, rel=0.05)
    assert parse_devices("4xH200").link_bytes_per_s("all_reduce") == pytest.approx(363e9, rel=0.05)
    assert parse_devices("8xB200").link_bytes_per_s("all_gather") == pytest.approx(680e9, rel=0.1)


def test_a_network_binds_where_it_is_slower() -> None:
    inside = parse_devices("8xH100").link_bytes_per_s("all_gather")
    assert parse_devices("2x8xH100,400Gb").link_bytes_per_s("all_gather") == 0.8 * 50 * GB
    assert parse_devices("2x8xH100,8x800Gb").link_bytes_per_s("all_gather") == inside


def test_rings_inside_and_across_nodes_share_the_network() -> None:
    cluster = parse_devices("4x(8xH100,nvlink),400Gb/s")
    node, nodes = cluster.subcluster("node"), cluster.subcluster("nodes")
    assert cluster.subcluster("all") is cluster
    assert (node.world_size, node.num_nodes, nodes.world_size, nodes.num_nodes) == (8, 1, 4, 4)
    alone = parse_devices("8xH100")
    assert node.link_bytes_per_s("all_gather") == alone.link_bytes_per_s("all_gather")
    # eight rings, one for each rank of a node
    assert nodes.link_bytes_per_s("all_reduce") == 0.8 * 50 * GB / 8
    assert node.latency_s < nodes.latency_s == cluster.latency_s


def test_a_bridge_joins_two() -> None:
    assert parse_devices("2x3090,nvlink").link_bytes_per_s("all_reduce") > 40 * GB
    four = parse_devices("4x3090,nvlink").link_bytes_per_s("all_reduce")
    assert four == parse_devices("4x3090,pcie").link_bytes_per_s("all_reduce") < 25 * GB


def test_one_device_waits_for_no_link() -> None:
    assert parse_devices("H100").link_bytes_per_s("all_reduce") == math.inf
    assert parse_devices("2x1xH100,400Gb").link_bytes_per_s("all_reduce") == 40 * GB


# -------------------------------------------------------------------- other sizes


def test_resized_fills_nodes_and_keeps_the_device() -> None:
    more = parse_devices("4xH100").with_num_ranks(32)
    assert (more.world_size, more.num_nodes, more.ranks_per_node) == (32, 4, 8)
    assert more.devices[0].name == "H100-80GB"
    assert "assuming 400 Gb/s into each node" in more.notes[-1]
    assert parse_devices("8xH100").with_num_ranks(2).link == "nvlink"
    assert parse_devices("8xH100").with_num_ranks(1).link == "none"
    assert parse_devices("H100").with_num_ranks(4).link == "nvlink"
    small = parse_devices("2x(4xA100-80GB),400Gb/s").with_num_ranks(32)
    assert (small.num_nodes, small.ranks_per_node, small.network_bandwidth) == (8, 4, 50 * GB)


def test_more_cpu_ranks_share_the_same_machine() -> None:
    two = cluster_spec.cluster_for_machine(
        Machine((), None, 8), cpu_ranks=2, host_free_bytes=16 * GIB
    )
    words = parse_devices("2xcpu")
    assert (two.kind, two.describe()) == ("cpu", "2 CPU ranks")
    assert two.smallest_device.free_bytes == 8 * GIB
    assert two.smallest_device.peak_flops("no") == words.smallest_device.peak_flops("no") * 4
    eight = two.with_num_ranks(8)
    assert (eight.world_size, eight.num_nodes, eight.link) == (8, 1, "cpu")
    assert eight.smallest_device.free_bytes == 2 * GIB
    assert eight.smallest_device.peak_flops("no") == two.smallest_device.peak_flops("no") / 4


# --------------------------------------------------------------------- nodes of a cluster


def node_of(
    *gpus: Gpu, free_gib: float = 500, cores: int = 64, ranks: int = 2
) -> cluster_spec.ClusterSpec:
    link = "NVLink" if len(gpus) > 1 else None
    machine_of = Machine(tuple(gpus), link, cores)
    return cluster_spec.cluster_for_machine(
        machine_of, cpu_ranks=ranks, host_free_bytes=int(free_gib * GIB)
    )


def test_nodes_that_are_alike_are_one_cluster() -> None:
    node = node_of(gpu(uuid="GPU-0"), gpu(uuid="GPU-1"))
    cluster = cluster_spec.cluster_for_nodes({"alpha": node, "beta": node, "gamma": node})
    assert (cluster.world_size, cluster.num_nodes, cluster.ranks_per_node) == (6, 3, 2)
    assert cluster.describe() == "3 x (2 x NVIDIA H100 80GB HBM3, nvlink), 400 Gb/s"
    (note,) = cluster.notes
    assert "No network given" in note
    assert cluster_spec.cluster_for_nodes({"alpha": node}) is node


def test_cpu_ranks_share_the_memory_and_the_cores_of_their_own_node() -> None:
    one = node_of(free_gib=16, cores=8)
    cluster = cluster_spec.cluster_for_nodes({"alpha": one, "beta": one})
    assert cluster.describe() == "4 CPU ranks on 2 nodes"
    assert (
        cluster.compute_speed_key(cluster.slowest_device)
        == one.compute_speed_key(one.slowest_device)
        == "2 CPU ranks"
    )
    assert cluster.smallest_device == one.smallest_device
    more = cluster.with_num_ranks(8)
    assert (more.num_nodes, more.ranks_per_node, more.network_bandwidth) == (
        2,
        4,
        cluster.network_bandwidth,
    )
    assert more.smallest_device.free_bytes == 4 * GIB


def test_of_unlike_nodes_the_least_counts_and_is_named() -> None:
    rich = node_of(free_gib=64, cores=32)
    poor = node_of(free_gib=12, cores=4)
    cluster = cluster_spec.cluster_for_nodes({"alpha": rich, "beta": poor})
    assert cluster.smallest_device == poor.smallest_device
    assert (cluster.host_memory_bytes, cluster.num_cpus) == (12 * GIB, 4)
    assert cluster.notes[:2] == (
        (
            "The nodes differ: beta has the least free host memory, 12.0 GiB against 64.0 GiB"
            " elsewhere; the plan assumes this minimum on every node."
        ),
        (
            "The nodes differ: beta has 4 cores against 32 elsewhere; all ranks wait for those on"
            " beta."
        ),
    )


def test_of_unlike_gpus_on_nodes_the_weakest_bind_and_the_slower_link_counts() -> None:
    fast = node_of(gpu(uuid="GPU-0"), gpu(uuid="GPU-1"))
    old = [gpu("Tesla T4", 14.6, f"GPU-{i}") for i in range(2)]
    cluster = cluster_spec.cluster_for_nodes({"alpha": fast, "beta": node_of(*old)})
    assert cluster.smallest_device.name == cluster.slowest_device.name == "Tesla T4"
    assert (cluster.link, cluster.ranks_per_node) == ("pcie", 2)
    assert "2 x NVIDIA H100 80GB HBM3 and 2 x Tesla T4" in cluster.notes[0]
    assert len([note for note in cluster.notes if "differ" in note]) == 1


def test_what_is_said_of_one_node_has_its_name() -> None:
    held = (GpuFreeMemory(40 * GIB, ("python (pid 4711)",)),)
    one = cluster_spec.cluster_for_machine(Machine((gpu(),), None, 8), held)
    cluster = cluster_spec.cluster_for_nodes({"alpha": node_of(gpu(), cores=8), "beta": one})
    assert any(note.startswith("On beta: GPU 0 has 40.0 of 79.1 GiB") for note in cluster.notes)
    assert cluster.smallest_device.free_bytes == 40 * GIB


# --------------------------------------------------------------------- this machine


def test_found_gpus_keep_the_drivers_name_and_memory() -> None:
    two = Machine((gpu(uuid="GPU-0"), gpu(uuid="GPU-1")), "NVLink", 64)
    cluster = cluster_spec.cluster_for_machine(two, host_free_bytes=500 * GIB)
    assert cluster.describe() == "2 x NVIDIA H100 80GB HBM3, nvlink"
    assert cluster.smallest_device.flops == gpu_catalog.GPU_CATALOG["H100-80GB"].flops
    assert cluster.smallest_device.free_bytes == int(79.1 * GIB)
    assert cluster.host_memory_bytes == 500 * GIB
    assert cluster.notes == ()
    assert cluster_spec.cluster_for_machine(replace(two, link="PCIe")).link == "pcie"


def test_what_others_hold_does_not_count_and_they_are_named() -> None:
    one = Machine((gpu(),), None, 8)
    cluster = cluster_spec.cluster_for_machine(
        one, (GpuFreeMemory(40 * GIB, ("python (pid 4711)",)),)
    )
    assert cluster.smallest_device.free_bytes == 40 * GIB
    assert cluster.notes == (
        (
            "GPU 0 has 40.0 of 79.1 GiB free; the plan uses no more. Also running on it:"
            " python (pid 4711)."
        ),
    )


def test_of_unequal_gpus_the_smallest_binds_and_is_named() -> None:
    gpus = (gpu(), gpu("NVIDIA GeForce RTX 3090", 23.7, "GPU-1"))
    cluster = cluster_spec.cluster_for_machine(Machine(gpus, "PCIe", 8))
    assert cluster.smallest_device.name == cluster.slowest_device.name == "NVIDIA GeForce RTX 3090"
    (note,) = cluster.notes
    assert "1 x NVIDIA H100 80GB HBM3 and 1 x NVIDIA GeForce RTX 3090" in note
    assert "RTX 3090 with 23.7 GiB free limits the memory" in note


def test_an_unknown_gpu_gets_typical_speeds_and_a_note() -> None:
    cluster = cluster_spec.cluster_for_machine(Machine((gpu("NVIDIA X9000", 79.0),), None, 8))
    assert cluster.smallest_device.name == "NVIDIA X9000"
    assert cluster.notes == (
        "NVIDIA X9000 is not in the catalogue: assuming the speeds of A100-80GB.",
    )


def test_a_mig_instance_has_its_share_of_the_speed() -> None:
    part = cluster_spec.cluster_for_machine(
        Machine((gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5),), None, 8)
    )
    whole = gpu_catalog.GPU_CATALOG["A100-80GB"]
    assert part.smallest_device.peak_flops("bf16") == pytest.approx(
        3 / 7 * whole.peak_flops("bf16")
    )
    assert part.smallest_device.memory_bandwidth == pytest.approx(
        whole.memory_bandwidth / 2, rel=0.02
    )
    assert part.smallest_device.memory_bytes == int(39.5 * GIB)
