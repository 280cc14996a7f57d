"""Transformers' Trainer: "resume" goes on from a checkpoint, "fsdp" asks for sharding."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from reported import report
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from torchmpi_plugin import integrations

WHAT, BACKEND = sys.argv[1:]
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
COMMON: dict[str, Any] = {
    "output_dir": f"output-{WHAT}-{BACKEND}",
    "ddp_backend": BACKEND,
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "max_steps": 8,
    "learning_rate": 5e-3,
    "logging_steps": 4,
    "report_to": [],
    "disable_tqdm": True,
}


def losses(trainer: Trainer) -> list[float]:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]


def trainer_with(**named: Any) -> Trainer:
    set_seed(1)
    sentences = [(torch.arange(12) + start) % 32 for start in range(64)]
    data = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
    arguments = TrainingArguments(**COMMON | {"ddp_find_unused_parameters": False} | named)
    return Trainer(model=LlamaForCausalLM(CONFIG), args=arguments, train_dataset=data)


def resume() -> list[float]:
    trainer_with(save_strategy="steps", save_steps=4).train()
    second = trainer_with(save_strategy="no", max_steps=12)
    second.train(resume_from_checkpoint=f"{COMMON['output_dir']}/checkpoint-8")
    assert second.state.global_step == 12
    return losses(second)


def fsdp() -> list[float]:
    trainer = trainer_with(save_strategy="no", fsdp=True, fsdp_config={"version": 2})
    trainer.train()
    kind = str(trainer.accelerator.distributed_type)
    sys.stdout.write(f"<sharded: {kind}, {type(trainer.model_wrapped).__name__}>\n")
    return losses(trainer)


integrations.activate("transformers")
report({"resume": resume, "fsdp": fsdp}[WHAT]())
dist.destroy_process_group()
