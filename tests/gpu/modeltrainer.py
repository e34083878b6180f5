"""One source rank with a transformers model on the GPU, for programs of this folder that run vLLM beside it.

They run with this folder on the path of every process: Ray puts the folder of a program there.
"""

from __future__ import annotations

import torch


class ModelTrainer:
    """A model of random weights in bfloat16.

    Args:
        config_dir: folder with the model's config.json.
    """

    def __init__(self, config_dir: str) -> None:
        import transformers

        torch.cuda.set_device(0)
        config = transformers.AutoConfig.from_pretrained(config_dir)
        with torch.device("cuda"):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def reroll(self, seed: int) -> None:
        """Draws all weights anew, where they lie."""
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.normal_(0, 0.02, generator=generator)
                if "norm" in name:
                    parameter.add_(1.0)
        torch.cuda.synchronize()

    def save(self, folder: str) -> None:
        """Writes a checkpoint of the present weights."""
        self.model.save_pretrained(folder)
