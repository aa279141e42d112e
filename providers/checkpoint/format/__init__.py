"""The files of a checkpoint: snapshot, tensor index, tensors and plain values."""
