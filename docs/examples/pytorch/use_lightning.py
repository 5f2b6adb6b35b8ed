"""Lightning. torchrun --nproc-per-node 2 docs/examples/pytorch/use_lightning.py"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import topknot.torch


class Compression(lightning.Callback):
    """Compresses what the strategy "ddp" exchanges. Its state is not in the trainer's checkpoints, which rank 0 writes."""

    def __init__(self, method, **keys):
        self.method, self.keys, self.hook = method, keys, None

    def on_train_start(self, trainer, module):
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self.hook = topknot.torch.CompressionHook(model, self.method, optimizer=optimizer, **self.keys)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


compression = Compression("topk", density=0.01)
data = DataLoader(TensorDataset(torch.randn(640, 64), torch.randint(10, (640,))), batch_size=32)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[compression],
                            logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip
trainer.fit(Classifier(), data)
if trainer.is_global_zero:
    print(f"sent {compression.hook.bytes_sent} bytes in {compression.hook.step} steps")
