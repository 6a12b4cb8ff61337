"""An HTTP service for models of any kind, and the page that explores them. `vitrail serve` starts it.

Needs the extra `serve`; torch is imported only by models that run on it.
"""
