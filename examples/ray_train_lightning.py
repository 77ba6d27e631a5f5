"""Train with PyTorch Lightning and Ray Train on two CPU workers, and resume from checkpoints.

    python examples/ray_train_lightning.py FOLDER [EPOCHS]

``FOLDER``: the storage path of Ray Train, which also contains the repository: ``s3://bucket/prefix`` or a folder that all nodes
share. To continue a run, start it again with more ``EPOCHS``. Needs ``pip install lightning``.
"""

import os
import sys

import lightning.pytorch as pl
import ray
import ray.train
import torch
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer

import raystow


class Autoencoder(pl.LightningModule):
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 64))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Return the reconstruction error."""
        loss = (self.layers(batch[0]) - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """Use AdamW with a decaying learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def train(config: dict[str, int]) -> None:
    """The training function of each worker."""
    pl.seed_everything(0)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64, generator=torch.Generator().manual_seed(0)))
    with raystow.ray_train.Checkpointer() as checkpointer:
        trainer = pl.Trainer(
            max_epochs=config["epochs"],
            accelerator="cpu",
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            callbacks=[raystow.lightning.Checkpointing(checkpointer, every_n_epochs=1)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            logger=False,
        )
        prepare_trainer(trainer).fit(Autoencoder(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))


if __name__ == "__main__":
    folder = sys.argv[1] if "://" in sys.argv[1] else os.path.abspath(sys.argv[1])
    ray.init(log_to_driver=False)
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": int(sys.argv[2]) if len(sys.argv) > 2 else 4},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="autoencoder",
            storage_path=folder,
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
    version = raystow.ray_train.version_of(result.checkpoint)
    print(f"version {version.id}: step {version.step}, loss {version.metrics['loss']:.6f}")
