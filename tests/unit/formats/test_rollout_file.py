"""The `rollout:` section of a job file: what it comes to, and what is said where it is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from trimtab.core.errors import InputError
from trimtab.formats.load import load
from trimtab.formats.rollout import job_section as rollout_file
from trimtab.formats.rollout.job_section import RolloutSettings
from trimtab.formats.rollout.schema import AttachedEngine, StartedEngines
from trimtab.machines.rollout.policies import policy as scaling
from trimtab.machines.rollout.policies.load import LoadSample, SleepCosts
from trimtab.model.rollout import Owner
from trimtab.runtime.gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[3]
PLANNED = ROOT / "src" / "trimtab" / "examples" / "grpo.yaml"


def read(text: str) -> RolloutSettings:
    return rollout_file.from_text(dedent(text), Path("job.yaml"))


def fault(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        read(text)
    return caught.value


def test_the_smallest_file_has_three_lines_and_attaches_one_engine() -> None:
    settings = read(
        """\
        rollout:
          engines:
            - http://127.0.0.1:8000
        """
    )
    (engine,) = settings.engines
    assert isinstance(engine, AttachedEngine)
    assert (engine.url, engine.version, engine.limit) == ("http://127.0.0.1:8000", None, 64)
    assert settings.gateway.host == "127.0.0.1"
    assert settings.rules.capacity == 64
    assert settings.elastic.policy == "static"
    assert settings.warnings() == []


def test_without_an_elastic_block_all_engines_that_can_be_had_serve() -> None:
    state = scaling.begin(read("rollout: {engines: [{kind: vllm, model: m, count: 3}]}").elastic)
    sample = LoadSample(0.0, 0, 0, 0, 1, 0, 0, 2, 8, 1, 3, (), SleepCosts())
    _, decision = scaling.consult(state, sample)
    assert decision.workers == 3
    assert "whatever the load" in decision.reason.sentence


def test_every_part_of_a_whole_file_is_read() -> None:
    settings = read(
        """\
        rollout:
          version: 7
          engines:
            - url: http://10.0.0.5:8000
              name: far
              limit: 128
              version: 6
              size: 4
              node: n5
            - kind: vllm
              model: /models/policy
              count: 4
              name: gen
              size: 2
              arguments: [--max-model-len, 8192]
              environment: {OMP_NUM_THREADS: 1}
              pool: rollout
              priority: 3
            - command: python serve.py --port {port}
              start_s: 900
          classes:
            validation: {priority: 10, queue_limit: 64, deadline_s: null}
          ownership: {refit: trimtab, abort: trainer}
          rules: {stall_s: 30, retries: 2}
          gateway:
            port: 9000
            allowed_hosts: trainer.local
            worker_hosts: [10.0.0.0/8]
          follow_weights: true
          journal: rollout.journal
        elastic_config:
          min_workers: 2
          max_workers: 6
          requests_per_worker_capacity: 32
          drain_timeout: 12
        """
    )
    far, gen, own = settings.engines
    assert isinstance(far, AttachedEngine)
    assert (far.name, far.limit, far.version, far.size, far.node) == ("far", 128, 6, 4, "n5")
    assert isinstance(gen, StartedEngines)
    assert gen.names == ("gen-1", "gen-2", "gen-3", "gen-4")
    assert (gen.arguments, gen.environment) == (("--max-model-len", "8192"), {"OMP_NUM_THREADS": "1"})
    assert (gen.pool, gen.resources, gen.priority) == ("rollout", {"gpu": 2.0}, 3.0)
    assert isinstance(own, StartedEngines)
    assert own.command == ("python", "serve.py", "--port", "{port}")
    rules = settings.rules
    assert (rules.version, rules.min_workers, rules.max_workers, rules.capacity, rules.drain_s) == (7, 2, 6, 32, 12)
    assert (rules.stall_s, rules.retries) == (30, 2)
    assert rules.start_s > 900
    assert (rules.ownership.refit, rules.ownership.abort) == (Owner.trimtab, Owner.trainer)
    assert rules.ownership.sleep is Owner.trimtab
    assert [(one.name, one.priority, one.deadline_s) for one in rules.classes] == [
        ("default", 0, 3600.0),
        ("validation", 10, None),
    ]
    assert (settings.gateway.port, settings.gateway.allowed_hosts) == (9000, ("trainer.local",))
    assert settings.section.follow_weights
    assert settings.beside(settings.section.journal) == Path("rollout.journal")
    assert settings.count == 6


@pytest.mark.parametrize(
    ("text", "where", "what", "hint"),
    [
        ("rollout:\n  engines: http://h:1\n  gatway: {}\n", "job.yaml:3: rollout.gatway", "unknown key", "gateway"),
        ("rollout:\n  engines:\n    - urk: x\n", "job.yaml:3: rollout.engines[0].urk", "unknown key urk", "url"),
        ("rollout:\n  engines:\n    - kind: vlm\n      model: m\n", "job.yaml:3", "kind is not right", "vllm?"),
        ("rollout:\n  engines: h:1\n", "job.yaml:2", "no address", "write http://"),
        ("rollout:\n  engines: http://h:x\n", "job.yaml:2", "no address", "HOST:PORT"),
        ("rollout:\n  engines: http://h:1/v1\n", "job.yaml:2", "no address", "HOST:PORT"),
        ("rollout:\n  engines: 3\n", "job.yaml:2: rollout.engines", "engines is not right", "list"),
        ("rollout:\n  engines:\n  - model: m\n", "job.yaml:3", "has a url", "kind: vllm"),
        ("rollout:\n  engines:\n  - kind: vllm\n", "job.yaml:3", "no model is given", "model: PATH"),
        ("rollout:\n  engines:\n  - url: http://h:1\n    count: 2\n", "job.yaml:4", "count is for engines", "leave"),
        (
            "rollout:\n  engines:\n  - kind: vllm\n    model: m\n    gpus: 2\n",
            "job.yaml:5",
            "applies to engines on a pool",
            "pool:",
        ),
        ("rollout:\n  engines:\n  - kind: vllm\n    model: m\n    count: 0\n", "job.yaml:5", "count is not", "or more"),
        ("rollout:\n  engines:\n  - http://h:1\n  - http://h:1/\n", "job.yaml:4", "there twice", "leave one"),
        ("rollout:\n  engines:\n  - {kind: vllm, model: m}\n  - {kind: vllm, model: n}\n", ":4", "twice", "another"),
        ("rollout:\n  engines: http://h:1\n  rules:\n    stal_s: 1\n", "job.yaml:4", "unknown key stal_s", "stall_s"),
        ("rollout:\n  engines: http://h:1\n  rules:\n    drain_s: 1\n", ":4", "no key of rules", "drain_timeout"),
        ("rollout:\n  engines: http://h:1\n  rules:\n    tries: many\n", ":4", "tries is not right", "whole number"),
        ("rollout:\n  engines: http://h:1\n  rules:\n    lost_s: 1\n", ":3", "lost_s 1 is under", ""),
        ("rollout:\n  engines: http://h:1\n  ownership:\n    refits: trainer\n", ":4", "unknown key", "refit?"),
        ("rollout:\n  engines: http://h:1\n  ownership:\n    refit: me\n", ":4", "refit is not right", "trainer"),
        ("rollout:\n  engines: http://h:1\n  classes:\n    a: {prio: 1}\n", ":4", "unknown key prio", "priority"),
        ("rollout:\n  engines: http://h:1\n  gateway: {port: 70000}\n", ":3", "port is not right", "65,535"),
        ("rollout:\n  engines: http://h:1\n  elastic_config: {}\n", ":3", "does not belong here", "beside"),
        ("rollout:\n  engines: http://h:1\nelastic_config:\n  max_worker: 2\n", ":4", "unknown key", "max_workers"),
        ("rollout:\n  engines: http://h:1\nelastic_config:\n  policy: thresold\n", ":4", "no policy", "threshold"),
        ("rollot:\n  engines: http://h:1\n", "job.yaml", "no rollout section", "instead of rollot"),
        ("cluster: {}\n", "job.yaml", "no rollout section", "add rollout"),
        ("- a\n", "job.yaml", "holds list", "rollout:"),
        ("rollout:\n  engines: [\n", "job.yaml, line", "not valid YAML", ""),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_what_to_do(text: str, where: str, what: str, hint: str) -> None:
    error = fault(text)
    assert where in (error.where or "")
    assert what in error.what
    assert hint in (error.hint or "")


def test_settings_that_are_likely_to_disappoint_are_said() -> None:
    settings = read(
        """\
        rollout: {engines: [{kind: vllm, model: m, count: 12, limit: 4}]}
        elastic_config: {scale_down_threshold: 0.75, scale_down_cooldown: 10}
        """
    )
    said = "\n".join(settings.warnings())
    for words in ("4 of them never serve", "limit 4 is below", "narrow", "shorter than scale_up_cooldown"):
        assert words in said
    few = read("rollout: {engines: http://h:1}\nelastic_config: {min_workers: 2}")
    assert any("never reached" in one for one in few.warnings())


def test_the_files_of_the_docs_and_the_example_are_right() -> None:
    page = (ROOT / "docs" / "reference" / "rollout-job.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert [read(block).count for block in blocks] == [1, 5]
    assert rollout_file.read(ROOT / "examples" / "rollout" / "job.yaml").warnings() == []


def test_engines_may_all_come_later() -> None:
    for text in ("rollout: {engines: []}", "rollout: {gateway: {port: 9000}}"):
        settings = read(text)
        assert (settings.engines, settings.count) == ((), 0)
        assert settings.warnings() == ["no engine is named: nothing is served until one is added (POST /workers)"]


def test_engines_of_a_pool_may_follow_its_nodes() -> None:
    settings = read("rollout: {engines: [{kind: vllm, model: m, pool: p, count: nodes, per_node: 4}]}")
    (engines,) = settings.engines
    assert isinstance(engines, StartedEngines)
    assert (engines.workers, engines.per_node, settings.count, settings.warnings()) == (None, 4, None, [])
    assert "of a pool follow" in fault("rollout: {engines: [{kind: vllm, model: m, count: nodes}]}").what


def test_an_engine_of_a_pool_may_be_over_several_nodes() -> None:
    text = "rollout: {engines: [{kind: vllm, model: m, size: 16, nodes: 2%s}]}"
    for more, gpus in ((", pool: p", 8.0), (", pool: p, gpus: 4", 4.0)):
        (engines,) = read(text % more).engines
        assert isinstance(engines, StartedEngines)
        assert (engines.nodes, engines.size, engines.resources["gpu"]) == (2, 16, gpus)
    assert "nodes applies to engines on a pool" in fault(text % "").what
    assert (
        "size 3 over 2 nodes" in fault("rollout: {engines: [{kind: vllm, model: m, size: 3, nodes: 2, pool: p}]}").what
    )


def test_what_becomes_of_an_engine_that_is_given_up_is_said_or_follows_from_its_kind() -> None:
    text = "rollout: {engines: [{kind: %s, model: m%s}]}"
    for kind, more, sleeps in (
        ("vllm", "", True),
        ("sglang", ", idle: stop", False),
        ("llamacpp", "", False),
        ("vllm", ", pool: p", False),
    ):
        (engines,) = read(text % (kind, more)).engines
        assert isinstance(engines, StartedEngines)
        assert engines.sleeps is sleeps
    assert "cannot sleep" in fault(text % ("llamacpp", ", idle: sleep")).what
    assert "devices for 1" in fault(text % ("vllm", ", count: 2, devices: ['0']")).what


def test_engines_that_the_world_can_reach_are_found() -> None:
    settings = read(
        "rollout: {engines: ['http://8.8.8.8:1', {kind: vllm, model: m, host: 0.0.0.0}, 'http://10.0.0.1:1']}"
    )
    assert settings.public_addresses() == [("8.8.8.8:1", "8.8.8.8"), ("vllm", "0.0.0.0")]


def test_the_planner_goes_on_reading_a_job_file_that_has_the_section(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    more = "\nrollout: {engines: http://127.0.0.1:8000}\nelastic_config: {max_workers: 4}\n"
    job.write_text(PLANNED.read_text() + more)
    assert load(job).job == load(PLANNED).job
    assert rollout_file.read(job).rules.max_workers == 4


def test_the_gateway_takes_as_many_requests_at_once_from_a_file_as_by_itself() -> None:
    settings = read("rollout: {engines: ['http://127.0.0.1:8000']}")
    assert settings.gateway.max_concurrent == GatewaySettings(token="t" * 32).max_concurrent == 16_384


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("elastic_config: {monitoring_interval: 1.0e-320}", "elastic_config.monitoring_interval"),
        ("elastic_config: {monitoring_interval: 1.0e+300}", "elastic_config.monitoring_interval"),
        ("elastic_config: {drain_timeout: 1.0e+300}", "elastic_config.drain_timeout"),
        ("elastic_config: {max_workers: 1000000000}", "elastic_config.max_workers"),
    ],
)
def test_every_time_and_count_of_elastic_config_has_a_range(text: str, key: str) -> None:
    with pytest.raises(InputError) as refused:
        read(f"rollout: {{engines: ['http://127.0.0.1:8000']}}\n{text}\n")
    assert key in (refused.value.where or "")
    assert "or more, up to" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("engines: [{kind: vllm, model: m, start_s: 1.0e-320}]", "start_s"),
        ("gateway: {deadline_s: 1.0e-320}", "gateway.deadline_s"),
        ("rules: {back_off_s: 1.0e+300}", "rules.back_off_s"),
        ("rules: {lost_s: -1}", "rules.lost_s"),
        ("classes: {a: {deadline_s: 1.0e+300}}", "classes.a.deadline_s"),
        ("engines: ['http://[x']", "engines"),
    ],
)
def test_every_time_of_a_rollout_file_has_a_range(text: str, key: str) -> None:
    with pytest.raises(InputError) as refused:
        read(f"rollout:\n  {text}\n")
    assert key in (refused.value.where or "")


@pytest.mark.parametrize(
    ("engines", "block", "policy"),
    [
        ("{command: [serve, '{port}'], count: 2}", "{max_workers: 2}", "predictive"),
        ("{command: [serve, '{port}'], count: 2}", "{max_workers: 2, policy: threshold}", "threshold"),
        ("{url: 'http://127.0.0.1:8000'}", "{max_workers: 2}", "threshold"),
    ],
)
def test_engines_that_trimtab_starts_are_scaled_by_what_it_learns_unless_a_policy_is_named(
    engines: str, block: str, policy: str
) -> None:
    found = rollout_file.from_text(f"rollout: {{engines: [{engines}]}}\nelastic_config: {block}\n", Path("job.yaml"))
    assert found.elastic.policy == policy
    said = [warning for warning in found.remarks() if "goes back" in warning]
    assert len(said) == (policy == "predictive")
