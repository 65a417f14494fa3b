One tunnel carries control calls, inference and model files as yamux streams with three traffic classes, so staging a model does not delay tokens. The wire stays plain yamux; docs/wire describes it.
