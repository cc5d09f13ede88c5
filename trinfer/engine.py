"""`init_inference` and the engine it returns."""

import inspect
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationMixin

from trinfer import backend, generation
from trinfer.backend import Backend
from trinfer.cache import bytes_per_token
from trinfer.compat import dtype_name, kv_shape
from trinfer.config import InferenceConfig, check_combinations, refuse_unbuilt
from trinfer.rewrite import Plan
from trinfer.rewrite import make_plan as plan_of
from trinfer.rewrite.masking import stops_generation
from trinfer.tune import refuse_to_tune, tune

logger = logging.getLogger(__name__)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> "InferenceEngine":
    """Prepare `model` for inference: read the options, make the plan, then convert, swap and place.

    Args:
        model: a Hugging Face model, or any module. It is changed in place; `engine.destroy()` takes it back.
        config: None, a dict, the path of a JSON file, or an InferenceConfig.
        kwargs: fields of InferenceConfig, merged with `config`.

    Returns:
        An engine that is called, generates and goes into a pipeline like the model.

    Raises:
        TypeError: `model` is not a torch module.
        ValueError: an option is wrong, or the model offers nothing to swap.
        NotImplementedError: an option asks for something that is not built yet.

    A refusal leaves the model untouched. A failure after that takes everything back but the dtype.
    """
    options, where, plan = prepare(model, config, kwargs)
    refuse_meta(model)
    limits = limits_of(model, options, where)
    if plan.masking is not None and stops_generation(plan.masking):
        limits = replace(limits, why_not=BOTH_WAYS)
    with undone_on_failure(model, plan):
        with rotary_frequencies_kept(model):
            model.to(options.dtype)
        swap(model, plan)
        if not options.keep_module_on_host:
            model.to(where.device)
        model.eval()
        decoder = _decoder(plan, options)
        generation.attach(model, limits, decoder)
        if options.triton_autotune:
            tune(model, options.max_out_tokens)
            if decoder is not None:
                # what the dry run recorded holds the configurations of before
                decoder.graphs.clear()
        return _engine_class(model)(model, options, plan)


def make_plan(model: nn.Module, config: Any = None, **kwargs: Any) -> Plan:
    """The plan that `init_inference` would follow; `model` is not touched and may be on the meta device."""
    return prepare(model, config, kwargs)[2]


def prepare(model: nn.Module, config: Any, kwargs: dict[str, Any]) -> tuple[InferenceConfig, Backend, Plan]:
    """Everything that can be refused before the model is looked at, then the plan."""
    refuse_other_than_module(model)
    options = InferenceConfig.merge(config, kwargs)
    check_combinations(options, backend.default_device().type)
    refuse_unbuilt(options)
    where = backend.check(options.dtype, options.use_triton)
    asked = "replace_with_kernel_inject=True" if options.replace_with_kernel_inject else "injection_policy"
    if (options.replace_with_kernel_inject or options.injection_policy) and not backend.has_triton():
        raise ValueError(
            f"{asked} needs Triton and {backend.why_reference()}; leave the option "
            "out to run the model's own code"
        )
    if options.triton_autotune:
        refuse_to_tune(model)
    return options, where, plan_of(model, options, where)


class InferenceEngine(nn.Module):
    """A model ready for inference; whatever the engine does not define itself is the model's.

    `module` is the model, `config` its own configuration, `inference_config` the options, `plan` what became
    of the model's parts and why. `generate` exists exactly when the model has one.
    """

    def __init__(self, module: nn.Module, inference_config: InferenceConfig, plan: Plan) -> None:
        super().__init__()
        self.training = False
        self.inference_config = inference_config
        self.plan = plan
        self._is_destroyed = False
        self._times_ms: list[Any] = []
        self._timers: tuple[Any, ...] = ()
        self._started: Any = None
        self._clock: Any = None
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def destroy(self) -> None:
        """Take back every swap; parameters converted to another dtype stay so. May be called again."""
        if self._is_destroyed:
            return
        self._is_destroyed = True
        for timer in self._timers:
            timer.remove()
        _undo(self.module, self.plan)
        if _converts(self.plan):
            logger.warning("the model keeps %s, %s", dtype_name(self.inference_config.dtype), CONVERTED)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward of the model from now on, and every prefill and step that runs as launches.

        `use_cuda_events` acts on a GPU only.
        """
        if self._timers:
            return
        self._clock = _gpu_mark if use_cuda_events and backend.kind() == "gpu" else time.perf_counter
        hooks = self.module.register_forward_pre_hook, self.module.register_forward_hook
        self._timers = hooks[0](self._start), hooks[1](self._stop)
        if (decoder := getattr(self.module, "_trinfer_decoder", None)) is not None:
            decoder.clock = self._timed

    def model_times(self) -> list[float]:
        """Milliseconds of every forward since the last call of this method.

        Raises:
            RuntimeError: `profile_model_time` was not called.
        """
        if not self._timers:
            raise RuntimeError("model_times() has nothing to tell; call engine.profile_model_time() first")
        marks, self._times_ms = self._times_ms, []
        return [_milliseconds(*pair) for pair in marks]

    def profile(self, rows: int = 1, tokens: int = 128) -> Any:
        """Where the time of a decode step goes, kernel by kernel, against the rate at which memory is read.

        Args:
            rows: sequences of the step.
            tokens: length of each.

        Returns:
            A `profiling.Profile`: `print` it, show it in a notebook, or `draw` it.

        Raises:
            ValueError: the model does not decode by launches, or the sizes are not positive or too large.
        """
        decoder, limit = getattr(self.module, "_trinfer_decoder", None), self.inference_config.max_out_tokens
        if decoder is None:
            raise ValueError(f"profile() times a step of launches, but here the step is {self.plan.step}")
        if rows < 1 or not 1 <= tokens <= limit - 8:
            raise ValueError(
                f"rows={rows}, tokens={tokens}; allowed: rows from 1, tokens from 1 to {limit - 8}, for "
                f"max_out_tokens={limit}; pass others"
            )
        # kernels need triton, which the mode without kernels does without
        from trinfer.profiling import profile_step

        with torch.no_grad():
            return profile_step(self.module, decoder, rows, tokens)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the model."""
        with rotary_frequencies_kept(self.module):
            self.module.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> Self:
        """Refuse training mode: the kernels neither drop out nor have gradients."""
        if mode:
            raise ValueError(
                "an inference engine has only eval mode; call engine.destroy() to train the model"
            )
        return super().train(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's parameters under the model's own keys."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load parameters under the model's own keys."""
        return self.module.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # engine.generation_config = ... means the model's, which is what generate reads
        inner = self.__dict__.get("_modules", {}).get("module")
        is_own = inner is None or name in self.__dict__ or name == "module" or hasattr(type(self), name)
        if not is_own and hasattr(inner, name):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.module,), self.__dict__

    @contextmanager
    def _timed(self) -> Iterator[None]:
        self._start()
        yield
        self._stop()

    def _start(self, *_: Any) -> None:
        self._started = self._clock()

    def _stop(self, *_: Any) -> None:
        self._times_ms.append((self._started, self._clock()))

    def _get_name(self) -> str:
        return "InferenceEngine"


BOTH_WAYS = (
    "with triangular_masking=False tokens attend to those that follow, and there are none yet; call the "
    "engine itself, or leave triangular_masking out"
)
CONVERTED = "as after model.to(dtype): what conversion rounded away cannot come back"


def _decoder(plan: Plan, options: InferenceConfig) -> Any:
    """What runs the decode steps of this model by launches; None where its forward does."""
    if plan.decoder is None:
        return None
    # kernels need triton, which the mode without kernels does without
    from trinfer.step import Decoder

    return Decoder(plan.decoder, options.enable_cuda_graph)


def refuse_other_than_module(model: Any) -> None:
    """Refuse what is not a torch module, and a module that an engine holds already."""
    if isinstance(model, InferenceEngine | generation.Limited):
        raise ValueError(
            f"this {type(model).__name__} belongs to an engine already; call engine.destroy() first, or pass "
            "a copy.deepcopy made before"
        )
    if isinstance(model, nn.Module):
        return
    hint = "pass a torch.nn.Module"
    if isinstance(getattr(model, "model", None), nn.Module):
        hint = "for a pipeline write pipe.model = trinfer.init_inference(pipe.model)"
    raise TypeError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module; {hint}")


def refuse_meta(model: nn.Module) -> None:
    """Refuse a model whose parameters hold no numbers."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if empty:
        names = ", ".join(empty[:8]) + (f" and {len(empty) - 8} more" if len(empty) > 8 else "")
        raise ValueError(f"the model has tensors on the meta device: {names}; load its weights first")


def limits_of(model: nn.Module, options: InferenceConfig, where: Backend) -> generation.Limits:
    """The limits of generation; refuses if not even one row of min_out_tokens fits into memory."""
    limits = generation.Limits(
        options.max_out_tokens,
        options.min_out_tokens,
        own_cache=options.replace_with_kernel_inject,
        waits_for=where.device.type if options.keep_module_on_host else "",
    )
    shape = kv_shape(model.config) if isinstance(model, GenerationMixin) else None
    if shape is not None:
        per_token = bytes_per_token(1, shape, options.dtype.itemsize)
        generation.tokens_that_fit(limits, 1, per_token, backend.free_bytes(where.device))
    return limits


@contextmanager
def rotary_frequencies_kept(model: nn.Module) -> Iterator[None]:
    """Keep the dtype of rotary frequencies through a conversion: in 16 bits they misplace far tokens."""
    frequencies = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    yield
    for module, name, buffer in frequencies:
        module._buffers[name] = buffer.to(module._buffers[name].device)  # type: ignore[union-attr]


def swap(model: nn.Module, plan: Plan) -> None:
    """Apply the swaps of a plan, if it has any."""
    if plan.swapped:
        # kernels need triton, which the mode without kernels does without
        from trinfer.rewrite.apply import apply

        apply(model, plan)


@contextmanager
def undone_on_failure(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Take everything back if the block raises; the error says what cannot come back."""

    def take_back(kind: Any, failure: BaseException | None, trace: Any) -> None:
        if failure is None:
            return
        _undo(model, plan)
        if _converts(plan):
            failure.add_note(f"the model was taken back to its own code; its dtype stays, {CONVERTED}")

    with ExitStack() as stack:
        stack.push(take_back)
        yield


def _undo(model: nn.Module, plan: Plan) -> None:
    generation.detach(model)
    if plan.swapped:
        # as in swap
        from trinfer.rewrite.apply import undo

        undo(model, plan)
    for path in plan.training:
        model.get_submodule(path).training = True


def _converts(plan: Plan) -> bool:
    return any(step.why.startswith("dtype") for step in plan.steps)


def _engine_class(model: nn.Module) -> type[InferenceEngine]:
    """A subclass with the model's class name and forward signature, which pipelines read."""

    def forward(self: InferenceEngine, *args: Any, **kwargs: Any) -> Any:
        return InferenceEngine.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    body = {"forward": forward, "__module__": __name__, "__doc__": InferenceEngine.__doc__}
    return type(type(model).__name__, (InferenceEngine,), body)


def _rebuild(module: nn.Module) -> InferenceEngine:
    cls = _engine_class(module)
    return cls.__new__(cls)


def _gpu_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, stop: Any) -> float:
    if isinstance(start, torch.cuda.Event):
        stop.synchronize()
        return start.elapsed_time(stop)
    return (stop - start) * 1e3
