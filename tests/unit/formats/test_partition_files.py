"""The pipeline's files: what is read, what is refused and how, and the schedule that is written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats import yaml_text
from trimtab.formats.pipeline import pipeedge
from trimtab.formats.pipeline.pipeedge import PartitionRequest, devices_yaml, load, scalar, schedule_yaml
from trimtab.model.pipeline import PipelineStage, Schedule
from trimtab.plan.partition.planner import plan_partition

EXAMPLE = Path(__file__).parents[3] / "examples" / "pipeline"


def small() -> dict[str, Any]:
    """Two layers, one type, two hosts."""
    profile = {"batch_size": 8, "dtype": "torch.float32", "time_s": [1.0, 2.0]}
    return {
        "models": {"m": {"layers": 2, "mem_MB": [10.0, 20.0], "parameters_in": 5, "parameters_out": [7, 9]}},
        "types": {"box": {"bw_Mbps": 100, "mem_MB": 1000, "model_profiles": {"m": [profile]}}},
        "devices": {"box": ["a", "b"]},
    }


class Files:
    """Three files in a folder, written from data or text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = small()
        self.links: Any = None

    def load(self, **request: Any) -> pipeedge.LoadedPipeline:
        for name in ("models", "types", "devices"):
            content = self.data[name]
            (self.folder / f"{name}.yml").write_text(content if isinstance(content, str) else yaml_text.dump(content))
        links = None
        if self.links is not None:
            links = self.folder / "links.yml"
            links.write_text(self.links)
        paths = (self.folder / f"{name}.yml" for name in ("models", "types", "devices"))
        return load(*paths, PartitionRequest(**{"model": "m", **request}), links)

    def refusal(self, **request: Any) -> str:
        with pytest.raises(InputError) as caught:
            self.load(**request)
        assert caught.value.exit_status == 2
        assert len(caught.value.lines()) <= 3
        return str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def example(model: str, **request: Any) -> pipeedge.LoadedPipeline:
    names = ("models.yml", "device_types.yml", "devices.yml")
    return load(*(EXAMPLE / name for name in names), PartitionRequest(model, **request))


@pytest.mark.parametrize(
    ("model", "bottleneck"), [("google/vit-base-patch16-224", 1.5399), ("google/vit-large-patch16-224", 5.0919)]
)
def test_the_example_has_the_least_bottleneck(model: str, bottleneck: float) -> None:
    answer = plan_partition(example(model).job)
    assert answer.schedule.bottleneck_seconds == pytest.approx(bottleneck, abs=5e-5)
    assert answer.optimal
    assert answer.ties_proven
    assert len(answer.schedule.stages) == 8


def test_the_example_names_the_type_without_profiles() -> None:
    (warning,) = example("google/vit-base-patch16-224").warnings
    assert "DummyDeviceType" in warning
    assert "hold no layers" in warning


def test_a_job_has_what_the_files_say(files: Files) -> None:
    loaded = files.load(headroom=0.1, source="a", sink="b", max_devices=2)
    assert loaded.warnings == ()
    job = loaded.job
    assert job.model.mem_mb == (10.0, 20.0)
    assert job.model.parameters_out == (7, 9)
    assert job.types[0].time_s == (1.0, 2.0)
    assert [host.name for host in job.hosts] == ["a", "b"]
    assert (job.element_bytes, job.headroom, job.source, job.sink, job.max_devices) == (4, 0.1, "a", "b", 2)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("torch.float32", 4),
        ("torch.float", 4),
        ("float16", 2),
        ("torch.half", 2),
        ("torch.bfloat16", 2),
        ("torch.float64", 8),
        ("torch.int8", 1),
        ("torch.float8_e4m3fn", 1),
        ("torch.bool", 1),
        ("torch.complex128", 16),
        ("torch.uint16", 2),
        ("torch.long", 8),
    ],
)
def test_every_dtype_has_its_size(files: Files, dtype: str, size: int) -> None:
    files.data["types"]["box"]["model_profiles"]["m"][0]["dtype"] = dtype
    assert files.load(dtype=dtype).job.element_bytes == size


def test_two_names_of_one_dtype_are_the_same(files: Files) -> None:
    files.data["types"]["box"]["model_profiles"]["m"][0]["dtype"] = "torch.half"
    assert files.load(dtype="torch.float16").job.types[0].time_s == (1.0, 2.0)


def test_an_unknown_dtype_is_refused_with_the_nearest(files: Files) -> None:
    assert "did you mean torch.float32?" in files.refusal(dtype="torch.flaot32")


def test_a_short_parameters_out_repeats_as_a_block(files: Files) -> None:
    files.data["models"]["m"] = {
        "layers": 5,
        "mem_MB": [1] * 5,
        "parameters_in": 1,
        "parameters_out": [7, 8],
    }
    files.data["types"]["box"]["model_profiles"]["m"][0]["time_s"] = [1.0] * 5
    loaded = files.load()
    assert loaded.job.model.parameters_out == (7, 8, 7, 8, 7)
    assert "2 entries for 5 layers" in loaded.warnings[0]


def test_a_model_without_layers_needs_no_profile(files: Files) -> None:
    files.data["models"]["m"] = {"layers": 0, "mem_MB": [], "parameters_in": 0, "parameters_out": []}
    answer = plan_partition(files.load().job)
    assert schedule_yaml(answer.schedule) == "[]\n"


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="there is no model google/vit-bas") as caught:
        example("google/vit-bas")
    assert "did you mean google/vit-base-patch16-224?" in str(caught.value)


def test_missing_and_malformed_files_are_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.yml"):
        load(tmp_path / "nowhere.yml", tmp_path / "t.yml", tmp_path / "d.yml", PartitionRequest("m"))
    files.data["models"] = "m: {layers: 2"
    assert "not valid YAML" in files.refusal()
    files.data["models"] = "- a list"
    assert "mapping of keys is expected" in files.refusal()
    files.data = small()
    files.data["devices"] = "- a\n- b\n"
    assert "devices.yml" in files.refusal()


@pytest.mark.parametrize("key", ["layers", "mem_MB", "parameters_in", "parameters_out"])
def test_a_missing_key_of_a_model_is_named(files: Files, key: str) -> None:
    del files.data["models"]["m"][key]
    assert f"{key} is missing" in files.refusal()


@pytest.mark.parametrize("key", ["bw_Mbps", "mem_MB"])
def test_a_missing_key_of_a_type_is_named(files: Files, key: str) -> None:
    del files.data["types"]["box"][key]
    assert f"{key} is missing" in files.refusal()


@pytest.mark.parametrize(
    ("key", "value", "length"),
    [("mem_MB", [1.0], 1), ("mem_MB", [1.0] * 3, 3), ("parameters_out", [1] * 3, 3), ("parameters_out", [], 0)],
)
def test_wrong_lengths_say_which_list_and_how_long_it_must_be(
    files: Files, key: str, value: list[Any], length: int
) -> None:
    files.data["models"]["m"][key] = value
    assert f"{key} has {length} entries, it must have 2" in files.refusal()


def test_a_profile_of_the_wrong_length_is_refused(files: Files) -> None:
    files.data["types"]["box"]["model_profiles"]["m"][0]["time_s"] = [1.0]
    said = files.refusal()
    assert "time_s has 1 entries, it must have 2" in said
    assert "box.model_profiles.m[0].time_s" in said


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "many", None, True, [1], 1e300, -(10**400)])
@pytest.mark.parametrize("key", ["bw_Mbps", "mem_MB", "time_s"])
def test_numbers_that_are_none_are_refused_with_their_key(files: Files, key: str, value: Any) -> None:
    box = files.data["types"]["box"]
    if key == "time_s":
        box["model_profiles"]["m"][0]["time_s"] = [1.0, value]
    else:
        box[key] = value
    if isinstance(value, int) and value < -(10**300):
        files.data["types"] = f"box: {{bw_Mbps: {value}, mem_MB: 10}}"
        key = "bw_Mbps"
    assert key in files.refusal()


def test_a_host_listed_twice_is_refused(files: Files) -> None:
    files.data["devices"] = {"box": ["a", "a"]}
    assert "host a is listed twice" in files.refusal()
    files.data["types"]["other"] = files.data["types"]["box"]
    files.data["devices"] = {"box": ["a"], "other": ["a"]}
    assert "under box and under other" in files.refusal()


def test_a_host_of_an_unknown_type_is_refused(files: Files) -> None:
    files.data["devices"] = {"boks": ["a"]}
    said = files.refusal()
    assert "host a is of an unknown type boks" in said
    assert "did you mean box?" in said


def test_a_profile_of_other_settings_is_no_profile_and_is_listed(files: Files) -> None:
    assert "there are profiles for batch size 8 with torch.float32" in files.refusal(batch_size=4)
    assert "there are profiles for batch size 8 with torch.float32" in files.refusal(dtype="torch.float16")


def test_hosts_without_a_profile_are_skipped_with_a_warning(files: Files) -> None:
    files.data["types"]["new"] = {"bw_Mbps": 10, "mem_MB": 10, "model_profiles": None}
    files.data["devices"]["new"] = ["n"]
    loaded = files.load()
    assert "new has no profile of m" in loaded.warnings[0]
    assert {stage.host for stage in plan_partition(loaded.job).schedule.stages} <= {"a", "b"}
    files.data["devices"] = {"new": ["n"]}
    assert "no device has a profile of m" in files.refusal()


def test_no_hosts_at_all_are_refused(files: Files) -> None:
    files.data["devices"] = {"box": []}
    assert "no hosts are listed" in files.refusal()
    files.data["devices"] = ""
    assert "no hosts are listed" in files.refusal()


def test_host_names_are_taken_as_written(files: Files) -> None:
    files.data["devices"] = "box: [010, 1.10, on, 10.0.0.1, null]\n"
    names = [host.name for host in files.load().job.hosts]
    assert names == ["010", "1.10", "on", "10.0.0.1", "null"]


def test_an_unknown_source_or_sink_is_refused_with_the_nearest_host(files: Files) -> None:
    files.data["devices"] = {"box": ["node-1", "node-2"]}
    assert "--source node-3: there is no such host" in files.refusal(source="node-3")
    assert "--sink nod" in files.refusal(sink="nod")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"buffers_in": -1}, "--buffers-in"),
        ({"buffers_out": -1}, "--buffers-out"),
        ({"max_devices": 0}, "--max-devices"),
        ({"headroom": 1.0}, "--headroom"),
        ({"cut_every": 0}, "--cut-every"),
        ({"cut_every": 3}, "does not divide the 2 layers"),
    ],
)
def test_settings_out_of_range_are_refused(files: Files, request_: dict[str, Any], said: str) -> None:
    assert said in files.refusal(**request_)


def test_links_are_read_for_pairs_groups_and_crossings(files: Files) -> None:
    files.data["devices"] = {"box": ["a", "b", "c", "d"]}
    files.links = (
        "- {hosts: [a, b, c], bw_Mbps: 50, latency_ms: 2}\n- {hosts: [a], to: [d], bw_Mbps: 1e2}\n"
        "- {hosts: [b, a], latency_ms: 1}\n"
    )
    links = {link.hosts: (link.bw_mbps, link.latency_s) for link in files.load().job.links}
    assert links == {("a", "b"): (None, 0.001), ("a", "c"): (50, 0.002), ("b", "c"): (50, 0.002), ("a", "d"): (100, 0)}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ("- {hosts: [a, z]}", "there is no host z"),
        ("- {hosts: [a]}", "two hosts"),
        ("- {hosts: [a, a]}", "linked to itself"),
        ("- {hosts: [a, b], bw: 3}", "unknown key bw"),
        ("- {hosts: [a, b], bw_Mbps: fast}", "expected: a number"),
        ("- {hosts: [a, b], latency_ms: -1}", "0 or more"),
        ("hosts: [a, b]", "a list is expected"),
        ("- a", "a section of keys"),
        ("- {hosts: a}", "expected: a list"),
    ],
)
def test_bad_links_are_refused(files: Files, links: str, said: str) -> None:
    files.links = links
    assert said in files.refusal()


@pytest.mark.parametrize(
    "name",
    ["mb-0", "10.0.0.1", "12", "1.5", "1e5", "0x1f", "on", "No", "null", "2020-01-01", "1:20", "a b", 'q"\\', "y"],
)
def test_names_come_back_as_the_same_text(name: str) -> None:
    stage = PipelineStage(name, "t", 1, 6, 1.0, 0.0, 1.0, 2.0)
    text = schedule_yaml(Schedule((stage,)))
    for version in ((1, 1), (1, 2)):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(text) == [{name: [1, 6]}]
    assert reader.load(devices_yaml({name: [name]})) == {name: [name]}


def test_plain_names_are_written_as_the_public_tool_does() -> None:
    assert [scalar(name) for name in ("mb-0", "10.0.0.1", "node.example")] == ["mb-0", "10.0.0.1", "node.example"]


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from(["m", "box", "torch.float32", "a", "", "layers", "nan", "1e999", "\u2028"]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["m", "box", "layers", "mem_MB", "parameters_in", "model_profiles", "hosts"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in nested data."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path] + [place for key, value in pairs for place in places(value, (*path, key))]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_stands_in_the_files_ends_in_a_plan_or_in_an_error_of_ours(
    tmp_path: Path, data: st.DataObject
) -> None:
    files = Files(tmp_path)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places(files.data)[1:]))
        target = files.data
        for key in place[:-1]:
            target = target[key]
        target[place[-1]] = data.draw(trees)
        for name, content in files.data.items():
            if not isinstance(content, dict | list | str):
                files.data[name] = str(content)
        if not all(isinstance(content, dict) for content in files.data.values()):
            break
    with suppress(TrimtabError):
        plan_partition(files.load().job, data.draw(st.sampled_from(["throughput", "latency"])))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["models", "types", "devices", "links"]), st.text(alphabet=st.characters(), max_size=60))
def test_any_text_ends_in_a_plan_or_in_an_error_of_ours(tmp_path: Path, name: str, text: str) -> None:
    files = Files(tmp_path)
    if name == "links":
        files.links = text.encode("utf-8", "replace").decode()
    else:
        files.data[name] = text.encode("utf-8", "replace").decode()
    with suppress(TrimtabError):
        plan_partition(files.load().job)


def test_of_two_profiles_of_the_same_settings_the_last_one_counts_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "models.yml").write_text("m: {layers: 1, mem_MB: [1], parameters_in: 1, parameters_out: [1]}\n")
    (tmp_path / "types.yml").write_text(
        "t:\n  bw_Mbps: 10\n  mem_MB: 10\n  model_profiles:\n    m:\n"
        "    - {dtype: torch.float32, batch_size: 8, time_s: [1.0]}\n"
        "    - {dtype: float, batch_size: 8, time_s: [2.0]}\n"
    )
    (tmp_path / "devices.yml").write_text("t: [a]\n")
    read = pipeedge.load(
        tmp_path / "models.yml", tmp_path / "types.yml", tmp_path / "devices.yml", pipeedge.PartitionRequest("m")
    )
    assert [kind.time_s for kind in read.job.types] == [(2.0,)]
    assert [one for one in read.warnings if "the last one counts" in one]
