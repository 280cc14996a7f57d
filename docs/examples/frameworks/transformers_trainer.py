"""Transformers' Trainer on mpiplus: mpirun -n 2 python transformers_trainer.py

A Llama of a few thousand parameters, made from a configuration: nothing is downloaded.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from torchmpi_plugin import integrations

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "mpiplus"

integrations.activate("transformers")  # or the variable MPIPLUS_INTEGRATIONS=transformers
set_seed(1)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
sentences = [(torch.arange(12) + start) % 32 for start in range(64)]
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        ddp_backend=BACKEND,
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=4,
        max_steps=16,
        learning_rate=5e-3,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    data = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    if arguments.process_index == 0:
        print(
            f"transformers on {dist.get_backend()}, {arguments.world_size} ranks: "
            f"loss {losses[0]:.6f} to {losses[-1]:.6f}"
        )
dist.destroy_process_group()
