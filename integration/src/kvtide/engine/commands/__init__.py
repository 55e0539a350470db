"""Commands of the engine, one module each; `kvtide.engine.cli` loads them by entry point."""
