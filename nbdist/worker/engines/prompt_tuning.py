"""Makes peft save the prompts of prompt tuning when their parameters are sharded.

A Trainer gathers the state dict on all ranks and saves it on rank 0. For other adapters peft saves
the tensors of this state dict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbdist.errors import OptionError
from nbdist.worker.engines import accelerator_patch
from nbdist.worker.library_patches import patch

if TYPE_CHECKING:
    from collections.abc import Mapping

MODULE = "peft.tuners.tuners_utils"


def patch_saving() -> None:
    """Patch peft after its import."""
    patch(f"{MODULE}:BasePromptEncoder._get_adapter_state_dict", _save_given_prompt)


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
            message = (
                f"peft computes the prompts of {config.peft_type.value} from several parameters,"
                f" which {options.backend} shards, so rank 0 cannot save them. Use the backend ddp,"
                " zero1 or zero2."
            )
            raise OptionError(message)
        saved: dict[str, Any] = original.__func__(
            cls, model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        return saved

    return classmethod(_get_adapter_state_dict)
