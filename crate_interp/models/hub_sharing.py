"""Keeping a model: save_pretrained, from_pretrained and push_to_hub, by huggingface_hub's mixin."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelHubMixin

from crate_interp.models.saving import save


class SharedModel(ModelHubMixin):
    """Models that are kept in folders with model.safetensors, config.json and a model card.

    crate_interp/models/saving.py writes them.
    """

    # it returns the folder
    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> Path:
        """Writes the model into a folder and returns the folder's path.

        `ci.load(folder, dtype=model.cfg.dtype)` reads it back bit for bit. Different from
        huggingface_hub's mixin: config.json is crate_interp's own, and an existing model card is
        left alone.
        """
        model: Any = self
        folder = save(model, Path(save_directory))
        if push_to_hub:
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if name not in ("config", "model_card_kwargs")
            }
            self.push_to_hub(repo_id or folder.resolve().name, **kwargs)
        return folder

    # options that ci.load has no use for are left out
    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Loads a model with `ci.load` and the same arguments.

        Raises ValueError if the model is of another class.
        """
        from crate_interp.checkpoints.load import load

        net: dict[str, Any] = dict(
            cache_dir=cache_dir, local_files_only=local_files_only, token=token
        )
        model = load(pretrained_model_name_or_path, revision=revision, **net, **model_kwargs)
        if not isinstance(model, cls):
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {type(model).__name__}, "
                f"not a {cls.__name__}: use {type(model).__name__}.from_pretrained, or ci.load, "
                "which takes any."
            )
        return model
