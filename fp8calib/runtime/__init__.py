"""The paged runtime: Hugging Face models on a KV cache of FP8 and native pages.

A token's way: llm.py takes prompts, engine.py runs one step after the other, scheduler.py picks the
requests of a step and block_manager.py gives them pages, model_runner.py runs the model with
forward_context.py set, paged_attention.py stores K and V in kv_store.py's pages and attends over
them, sampler.py picks the next token, detokenizer.py makes text of it.
"""
