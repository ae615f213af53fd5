"""Fine-tune a model of transformers in a pipeline: examples/transformers_plain.py with the lines that it takes.

sh transformers_pipeline.sh
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from optpipe_torch.frameworks.transformers import pipelined, save_pretrained


def model() -> torch.nn.Module:
    """Return the model; in earnest AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=160)
    config.vocab_size, config.tie_word_embeddings, config.eos_token_id = 256, True, 0
    return AutoModelForCausalLM.from_config(config)


def batches(steps: int) -> list[torch.Tensor]:
    """Return token ids of (microbatches * microbatch size, sequence)."""
    return list(torch.randint(256, (steps, 8, 32), generator=torch.Generator().manual_seed(0)))


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    pretrained = model()
    runner, stages = pipelined(pretrained, "schedule.json", batches(1)[0])
    optimizer = torch.optim.AdamW(stages.module.parameters(), lr=3e-4)
    for tokens in batches(3):
        loss = runner.step(tokens, target=tokens).loss
        optimizer.step()
        optimizer.zero_grad()
        if loss is not None:  # on the rank of the last stage
            print(f"loss {loss:.4f}")
    save_pretrained(pretrained, stages, "trained")


if __name__ == "__main__":
    main()
