"""The one conftest that every test of every distribution starts from."""

pytest_plugins = ["torchrun"]  # @pytest.mark.processes, from core/tests/support
