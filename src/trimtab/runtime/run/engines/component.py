"""The rollout component of a run as a pool of engines: `use: trimtab.rollout:EngineRollout`.

    settings:
      ask: package.module:Asking      # requests(batch) -> prompts and SamplingParams; answers(batch, completions)
      engine: package.module:Engine   # a class with generate(order) ...; or command: "vllm serve ... --port {port}"
      gpus_each: 1

A step sends all requests of its batch and returns their results. Every completion is whole, even if engines were
killed, evicted or removed meanwhile. Weights reach every engine before the next step, and engines that join later
before they serve. Requests are seeded from (seed, iteration, batch, prompt) if the engine samples from its seed: a
request that is answered twice, or in a resumed run, gets the same completion.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from trimtab.core.errors import InputError, UnreachableError
from trimtab.model.rollout import End, WorkerState
from trimtab.runtime.rollout.sampling import Completion, Sample, SamplingParams
from trimtab.runtime.run.component import Batch, Place, Result, find_class
from trimtab.runtime.run.engines.engine_pool import EngineSettings, RunEnginePool, read_settings
from trimtab.runtime.run.engines.object_engine import no_refit_error, place_for

CHECK_S = 1.0  # between checks whether any engine can still serve
STATE = "weights.pickle"
SEEDS = 2**31  # seeds below this are valid for every engine


class EngineRollout(RunEnginePool):
    """Rollout on engines behind a pool. Settings are those of `EngineSettings`."""

    brings_workers: ClassVar[bool] = True

    def __init__(self, *, place: Place, ask: str, **settings: Any) -> None:
        checked, near = read_settings({"ask": ask, **settings}), place.near or Path.cwd()
        self._ask = _make_ask_object(checked, place, near)
        self._version = 0  # the run's version of the weights
        self._weights_number = 0  # the pool's version: it only grows, even if a run goes back
        self._weights: Any = None
        self._weights_by_path: dict[str, Any] = {}  # by the path that stands for them: the last two
        super().__init__(checked, place, near, self._weights_by_path.__getitem__)
        try:
            self.wait(self.wait_ready(), None)
        except BaseException:
            self.close()
            raise

    # ---- component interface -------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Result:
        """Generate completions for all requests of a batch."""
        prompts, params = _requests(self._ask.requests(batch), self.place.component)
        each = [self._seeded(sampling, batch, index) for index, sampling in enumerate(params)]
        completions, workers = self.wait(self._generate_all(prompts, each), None)
        samples = [sample for completion in completions for sample in completion.samples]
        for sample in samples:
            if sample.end in (End.failed, End.cancelled):
                raise UnreachableError(f"a request was not answered: {sample.reason.sentence}")
        made = self._ask.answers(batch, completions)
        result = made if isinstance(made, Result) else Result(made)
        return Result(result.data, {**self._metrics(samples, workers), **result.metrics})

    def sync(self, weights: Any, version: int) -> None:
        """Give these weights to every engine before it serves again."""
        if not self.takes_weights:
            raise no_refit_error(self.place.component)
        self._weights_number += 1
        path = self._store_weights(weights)
        self._weights, self._version = weights, version
        rules = self.settings.rollout_rules(0, 1)
        self.wait(self._refit_all(self._weights_number, path), rules.refit_s + rules.pause_s)

    def save(self, path: Path) -> None:
        (path / STATE).write_bytes(pickle.dumps((self._version, self._weights), protocol=5))

    def load(self, path: Path) -> None:
        version, weights = pickle.loads((path / STATE).read_bytes())
        if weights is not None:
            self.sync(weights, version)

    def health(self) -> bool | str:
        """True, unless no engine will ever serve."""

        async def failure() -> str:
            return self.permanent_failure()

        return self.wait(failure(), None) or True

    async def _generate_all(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> tuple[list[Completion], int]:
        """The completions, and how many engines serve at the end."""
        pool = self.pool
        pending = asyncio.gather(
            *(pool.generate([prompt], sampling) for prompt, sampling in zip(prompts, params, strict=True))
        )
        try:
            while not pending.done():
                await asyncio.wait({pending}, timeout=CHECK_S)
                if not pending.done():
                    self.raise_if_no_engine_left()
        finally:
            pending.cancel()
        active = sum(worker.state is WorkerState.active for worker in pool.workers())
        return [completion for row in pending.result() for completion in row], active

    async def _refit_all(self, number: int, path: str) -> None:
        async with self.pool.refit(number) as refit:
            await refit.load(path)
        known = self.pool.weights
        for old in [version for version in known if version < number - 1]:
            del known[old]

    def _store_weights(self, weights: Any) -> str:
        """The path that stands for these weights: their own, or a key for engines in this process."""
        if self.settings.command is not None:
            if not isinstance(weights, str | Path):
                raise InputError(
                    f"the weights are a {type(weights).__name__}, and engines that are commands read them from disk",
                    where=self.place.component,
                    hint="let the trainer's weights() write a checkpoint and give its path",
                )
            return str(weights)
        path = f"weights-{self._weights_number}"
        if self.place.on_slots:
            import ray

            weights = [ray.put(weights)]  # a reference in a list is not resolved by Ray
        self._weights_by_path[path] = weights
        for old in list(self._weights_by_path)[:-2]:
            del self._weights_by_path[old]
        return path

    def _seeded(self, params: SamplingParams, batch: Batch, index: int) -> SamplingParams:
        if params.seed is not None or not self.settings.seeds:
            return params
        numbers = (self.place.seed, batch.iteration, batch.index, index)
        digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
        return replace(params, seed=int.from_bytes(digest, "little") % (SEEDS - params.n))

    def _metrics(self, samples: Sequence[Sample], workers: int) -> dict[str, float]:
        tokens = sum(len(sample.token_ids) for sample in samples)
        figures = {
            "tokens": tokens,
            "length": tokens / max(1, len(samples)),
            "resumed": sum(len(sample.workers) > 1 or sample.moves + sample.restarts > 0 for sample in samples),
            "workers": workers,
        }
        if self.gateway_url:
            figures["gateway_port"] = int(self.gateway_url.rpartition(":")[2])
        return {name: float(value) for name, value in figures.items()}


def _signature() -> inspect.Signature:
    """Signature for job files, so that unknown settings are refused before anything is created."""
    own = inspect.signature(EngineSettings).parameters.values()
    named = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
    return inspect.Signature([*named, inspect.Parameter("place", inspect.Parameter.KEYWORD_ONLY)])


EngineRollout.__signature__ = _signature()  # type: ignore[attr-defined]


def _make_ask_object(settings: EngineSettings, place: Place, near: Path) -> Any:
    """The user's object that makes requests of a batch and the step's output of completions."""
    where = "settings.ask"
    kind = find_class(settings.ask, near, where)
    for method in ("requests", "answers"):
        if not callable(getattr(kind, method, None)):
            raise InputError(
                f"{settings.ask} has no {method}",
                where=where,
                hint="it has requests(batch) and answers(batch, completions)",
            )
    given = {**settings.ask_settings, **place_for(kind, place)}
    try:
        inspect.signature(kind).bind(**given)
    except TypeError as error:
        raise InputError(f"{settings.ask} cannot be made with ask_settings: {error}", where=where) from None
    return kind(**given)


def _requests(pair: Any, component: str) -> tuple[list[Sequence[int]], list[SamplingParams]]:
    """Prompts and the SamplingParams of each."""
    hint = "requests(batch) gives (prompts, SamplingParams), or (prompts, one SamplingParams for each)"
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise InputError(f"{component}: requests(batch) did not return a pair", where="settings.ask", hint=hint)
    prompts, params = list(pair[0]), pair[1]
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts) or not all(isinstance(sampling, SamplingParams) for sampling in each):
        raise InputError(f"{len(prompts)} prompts and {len(each)} SamplingParams", where="settings.ask", hint=hint)
    return prompts, each
