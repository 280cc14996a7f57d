"""Transformers: ``--ddp_backend mpiplus`` on the command line. In code its Trainer asks Accelerate."""

from __future__ import annotations

from types import ModuleType

from ..names import BACKEND
from .importing import ChangedError, Integration


def _change(module: ModuleType) -> None:
    fields = getattr(getattr(module, "TrainingArguments", None), "__dataclass_fields__", {})
    choices = fields["ddp_backend"].metadata.get("choices") if "ddp_backend" in fields else None
    if not isinstance(choices, list) or "gloo" not in choices:
        raise ChangedError('TrainingArguments.ddp_backend with a list of choices in its metadata, with "gloo"')
    choices.append(BACKEND)


INTEGRATIONS = (Integration("transformers", "transformers.training_args", (4, 40), (6, 0), _change),)
