"""Hugging Face's Trainer. torchrun --nproc-per-node 2 docs/examples/pytorch/use_transformers.py"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import topknot.torch


class Compression(TrainerCallback):
    """Compresses what the Trainer's DistributedDataParallel exchanges."""

    def __init__(self, method, **keys):
        self.method, self.keys, self.trainer, self.hook = method, keys, None, None

    def on_step_begin(self, arguments, state, control, **_):
        if self.hook is None:  # the model is wrapped between on_train_begin and the first step
            model, optimizer = self.trainer.model_wrapped, self.trainer.optimizer
            self.hook = topknot.torch.CompressionHook(model, self.method, optimizer=optimizer, **self.keys)


tokens = torch.randint(100, (320, 33), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=64, n_embd=64, n_layer=2, n_head=2))
compression = Compression("topk", density=0.01)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(output_dir=folder, use_cpu=True, optim="sgd", max_steps=10, per_device_train_batch_size=8,
                                  save_strategy="no", report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False)  # fmt: skip
    compression.trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[compression])
    result = compression.trainer.train()
if arguments.process_index == 0:
    print(f"loss {result.training_loss:.3f}; sent {compression.hook.bytes_sent} bytes in {compression.hook.step} steps")
