"""Programs that share a training between processes with PyTorch alone: DDP, a parameter server over RPC, Hogwild."""
