"""One file per command-line agent that is run against the endpoint. Installed as `minirllm.harnesses`."""
