"""The paged runtime: Hugging Face models on a KV cache of FP8 and native pages.

A token's way: llm.py (or async_llm.py) takes prompts, engine.py runs one step after the other,
scheduler.py picks the requests of a step and block_manager.py gives them pages, executor.py hands
them to model_runner.py, which runs the model with forward_context.py set, alone or as one of
cuda_graphs.py; paged_attention.py stores K and V in kv_store.py's pages and attends over them,
sampler.py picks the next token, detokenizer.py makes text of it.
"""
