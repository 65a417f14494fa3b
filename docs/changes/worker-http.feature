A worker hands the frontends' HTTP streams to its own server without a loopback connection in between: staging costs a quarter less processor time.
