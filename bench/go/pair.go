// A port forward with Go's hashicorp/yamux over gorilla/websocket. `pair accept` prints the port of the tunnel and the one it
// forwards; `pair dial TUNNEL TARGET` dials the tunnel and joins each stream to TARGET.

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/gorilla/websocket"
	"github.com/hashicorp/yamux"
)

// carrier is a WebSocket as a byte stream.
type carrier struct {
	*websocket.Conn
	rest io.Reader
}

func (c *carrier) Read(into []byte) (int, error) {
	for {
		if c.rest == nil {
			_, reader, err := c.NextReader()
			if err != nil {
				return 0, err
			}
			c.rest = reader
		}
		n, err := c.rest.Read(into)
		if err == io.EOF {
			c.rest = nil
			err = nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (c *carrier) Write(from []byte) (int, error) {
	return len(from), c.WriteMessage(websocket.BinaryMessage, from)
}

func join(a, b net.Conn) {
	go func() { io.Copy(a, b); a.(interface{ Close() error }).Close() }()
	io.Copy(b, a)
	if half, ok := b.(*net.TCPConn); ok {
		half.CloseWrite()
	} else {
		b.Close()
	}
}

func accept() {
	forward, _ := net.Listen("tcp", "127.0.0.1:0")
	tunnel, _ := net.Listen("tcp", "127.0.0.1:0")
	fmt.Println(tunnel.Addr().(*net.TCPAddr).Port, forward.Addr().(*net.TCPAddr).Port)
	upgrader := websocket.Upgrader{ReadBufferSize: 65536, WriteBufferSize: 65536}
	http.Serve(tunnel, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			return
		}
		session, _ := yamux.Client(&carrier{Conn: conn}, settings())
		for {
			local, err := forward.Accept()
			if err != nil {
				return
			}
			stream, err := session.Open()
			if err != nil {
				return
			}
			go join(local, stream)
		}
	}))
}

func settings() *yamux.Config {
	config := yamux.DefaultConfig()
	config.MaxStreamWindowSize = 4 << 20
	return config
}

func main() {
	if os.Args[1] == "accept" {
		accept()
	}
	dialer := websocket.Dialer{ReadBufferSize: 65536, WriteBufferSize: 65536}
	conn, _, err := dialer.Dial("ws://127.0.0.1:"+os.Args[2]+"/", nil)
	if err != nil {
		panic(err)
	}
	session, _ := yamux.Server(&carrier{Conn: conn}, settings())
	fmt.Println("dialled")
	for {
		stream, err := session.Accept()
		if err != nil {
			return
		}
		target, err := net.Dial("tcp", "127.0.0.1:"+os.Args[3])
		if err != nil {
			panic(err)
		}
		go join(target, stream)
	}
}
