"""Makes peft save adapters whose parameters are sharded, and refuses a merge that would lose them.

A Trainer gathers the state dict on all ranks and saves it on rank 0. For most adapters peft saves
the tensors of this state dict; for prompt tuning it would compute them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.strategies import STRATEGIES
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.library_patches import patch
from nbdist.worker.training import generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MODULE = "peft.peft_model"
_TUNERS = "peft.tuners.tuners_utils"
_FSDP1_PREFIX = "_fsdp_wrapped_module."


def patch_peft() -> None:
    """Patch peft after its import."""
    patch(f"{MODULE}:PeftModel.named_modules", _without_fsdp1)
    patch(f"{MODULE}:PeftModel.save_pretrained", generation.save_from_all_ranks)
    patch(f"{_TUNERS}:BasePromptEncoder._get_adapter_state_dict", _save_given_prompt)
    patch(f"{_TUNERS}:BaseTuner._unload_and_optionally_merge", _check_merge)
    patch(f"{_TUNERS}:BaseTuner.merge_adapter", _check_merge)


def _without_fsdp1(original: Callable[..., Any]) -> Callable[..., Any]:
    def named_modules(
        self: Any, memo: Any = None, prefix: str = "", *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, Any]]:
        for name, module in original(self, memo, prefix, *args, **kwargs):
            yield prefix + name[len(prefix) :].replace(_FSDP1_PREFIX, ""), module

    return named_modules


def _check_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(hasattr(p, "ds_id") and not p.numel() for p in self.model.parameters()):
            message = (
                "peft cannot merge or unload an adapter whose base is partitioned by ZeRO-3. Save"
                " the adapter, and merge it into a new copy of the base:"
                " PeftModel.from_pretrained(base, folder).merge_and_unload()."
            )
            raise OptionError(message)
        return original(self, *args, **kwargs)

    return merge


def _save_given_prompt(original: Any) -> Any:
    def _get_adapter_state_dict(
        cls: type,
        model: Any,
        config: Any,
        adapter_name: str,
        state_dict: Mapping[str, Any],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Any]:
        if not state_dict:
            return {}  # as for other adapters: an export writes only the config this way
        encoder = f"prompt_encoder.{adapter_name}."
        of_encoder = [name for name in state_dict if name.startswith(encoder)]
        if of_encoder == [f"{encoder}embedding.weight"]:
            return {"prompt_embeddings": state_dict[of_encoder[0]]}
        options = accelerator_patch.current_config().options
        if "parameters" in options.strategy.shards:
            # A forward of the encoder on rank 0 fails under FSDP and hangs under ZeRO-3.
            whole = [name for name, it in STRATEGIES.items() if "parameters" not in it.shards]
            message = (
                f"peft computes the prompts of {config.peft_type.value} from several parameters,"
                f" which {options.backend} shards, so rank 0 cannot save them. Use one of the"
                f" backends {', '.join(whole)}."
            )
            raise OptionError(message)
        saved: dict[str, Any] = original.__func__(
            cls, model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        return saved

    return classmethod(_get_adapter_state_dict)
