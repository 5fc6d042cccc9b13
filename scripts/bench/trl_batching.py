"""TRL's GRPOTrainer on transformers' continuous batching, as a side of the end-to-end benches."""

from trl_loop import main

if __name__ == "__main__":
    main(continuous_batching=True)
