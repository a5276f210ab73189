# make report     measure the embedded model, write runs/first/report.html
# make test       the fast tests, after make browser; WHEEL=1: of the built wheel, in an environment outside the checkout
# make test-all   every test, with 200 examples for each property
# make oracles    compute the recorded oracles anew
# make golden     whether any number has moved: every verb, option and way to run, 15 minutes; prints what moved
# make check      ruff and pyright
# make bench      the benchmarks
# make cost       what verbs cost at the size of CRATE-B, in forwards a sample, beside the goals
# make gpu        the tests of GPUs, on the CUDA device of this machine
# make tables     audit the embedded models and print the table of the README
# make kill       200 SIGKILLs at random moments of everything that writes a folder, and 20 each of a sweep and an
#                 audit of 5,000 images that go on
# make pairs      five CRATEs against five ViTs from shipped weights; runs/crate-against-vit
# make family     five kinds of white-box transformers and a ViT from shipped weights; runs/family
# make labs       the papers' own experiments in their quick forms; runs/labs
# make truth      what finders find in planted circuits, and who is at chance; runs/truth
# make docs       the documentation site, without a network; runs/site
# make transformerlens  TransformerLens' own tests and six of its tutorials on our models
# make oldest     install the oldest dependencies that pyproject.toml admits, run the fast tests
# make newest     install the newest dependencies that pyproject.toml admits, run the fast tests
# make pythons    the fast tests on each Python from 3.11 on that pyenv has, with the versions of constraints.txt
# make torchvision  what torchvision's data sets, loaders and transforms give, in an environment with torchvision
# make graphs     how far attribution graphs may be trusted, on 20 inputs a model: table, picture
# make notebooks  run demos/NN_*.py top to bottom, and keep the notebooks with their outputs
# make pictures   open the pages in headless Chromium, wide and narrow, light and dark; runs/pictures, and the small
#                 pictures of the documentation
# make maskcut    300 grids against the dense solver, an hour
# make browser    install Debian's Chromium for the tests of pages, if it is missing and we may install it
# make clean      remove what make made

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
OUT ?= runs/first

.PHONY: report test test-all oracles golden check kill bench cost gpu maskcut pictures notebooks tables pairs \
	family labs truth docs transformerlens oldest newest pythons torchvision browser graphs clean

report: $(INSTALLED)
	$(BIN)/crate-interp report crate-tiny-fashion --data embedded:fashion --out $(OUT) --audit

ifdef WHEEL
test:
	bash tests/wheel.sh $(PYTHON)
else
test: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 $(ARGS)
endif

browser:
	@bash tests/install_chromium.sh

test-all:
	CRATE_SLOW=all CRATE_PROFILE=thorough $(MAKE) test

oracles: $(READY)
	$(BIN)/python tests/record_oracles.py

golden: $(READY)
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m golden.golden $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

kill: $(READY)
	$(BIN)/python tests/kill.py 200
	$(BIN)/python tests/kill_runs.py 20

bench: $(READY)
	failed=0; for file in tests/benchmarks/bench_*.py; do \
		OMP_NUM_THREADS=1 $(BIN)/python $$file || failed=1; done; exit $$failed

cost: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/benchmarks/bench_verbs.py

gpu: $(READY)
	$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('there is no CUDA device')"
	$(BIN)/python -m pytest -q tests/test_cuda.py

maskcut: $(READY)
	$(BIN)/python tests/benchmarks/check_maskcut.py

pictures: $(READY)
	cd tests && ../$(BIN)/python pictures.py ../runs/pictures --docs

tables: $(READY)
	$(BIN)/python demos/tables.py

pairs: $(READY)
	$(BIN)/python demos/crate_against_vit.py --out runs/crate-against-vit

family: $(READY)
	$(BIN)/python demos/whitebox_family.py --out runs/family

labs: $(READY)
	$(BIN)/python demos/labs/all.py --out runs/labs

truth: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python demos/labs/truth.py --out runs/truth

docs: $(READY)
	$(BIN)/python demos/docs/generated.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet -f demos/docs/mkdocs.yml

transformerlens: $(READY)
	$(BIN)/python tests/transformerlens_suite.py -n 2
	$(BIN)/python tests/transformerlens_demos.py

oldest newest torchvision:
	bash tests/versions.sh $@ $(PYTHON) $(ARGS)

pythons: browser
	bash tests/versions.sh $@ $(ARGS)

graphs: $(READY)
	$(BIN)/python demos/how_far_graphs_go.py

notebooks: $(READY)
	$(BIN)/python demos/run_notebooks.py --out runs/notebooks --keep

# Made anew when a version changes; otherwise nothing is installed and no network is needed. A report
# needs the library alone, which takes half of the time.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	touch $(INSTALLED)

$(READY): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv dist build runs .pytest_cache .ruff_cache
