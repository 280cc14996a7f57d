"""TrainingArguments from the command line, and what they make of the ranks."""

import sys

from transformers import HfArgumentParser, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
backend = arguments.distributed_state.backend
sys.stdout.write(f"<{arguments.process_index} of {arguments.world_size} on {backend}>\n")
