Cancelling a load while its backend is being installed stops the copying on the worker within two seconds and removes what came; an install that another load waits for goes on.
