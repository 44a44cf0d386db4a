"""Tasks that come with minirllm: one file each, usable by name or by path. Files that begin with _ are no tasks."""
