"""Fine-tune a model of transformers on one device: what examples/transformers_pipeline.py starts from.

python transformers_plain.py
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


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
    optimizer = torch.optim.AdamW(pretrained.parameters(), lr=3e-4)
    for tokens in batches(3):
        loss = pretrained(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    pretrained.save_pretrained("trained")


if __name__ == "__main__":
    main()
