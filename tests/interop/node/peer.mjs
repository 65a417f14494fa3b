// A yamux peer on Node with @libp2p/yamux: `node peer.mjs listen` prints its port, `node peer.mjs dial PORT` dials.
// What its streams do is in tests/interop/__init__.py. The last line says what became of the session.
import net from 'node:net'

// Node 20 lacks it, and the libraries use it while they are loaded.
Promise.withResolvers ??= function () {
  let resolve, reject
  const promise = new Promise((yes, no) => { resolve = yes; reject = no })
  return { promise, resolve, reject }
}
const { yamux } = await import('@libp2p/yamux')
const { AbstractMultiaddrConnection } = await import('@libp2p/utils')
const { defaultLogger } = await import('@libp2p/logger')
const { multiaddr } = await import('@multiformats/multiaddr')

const bytes = (text) => new TextEncoder().encode(text)
const CHECKED = 1_000_000

class SocketConnection extends AbstractMultiaddrConnection {
  constructor (socket, direction) {
    super({ remoteAddr: multiaddr('/ip4/127.0.0.1/tcp/1'), direction, log: defaultLogger().forComponent('peer') })
    this.socket = socket
    socket.on('data', (chunk) => this.onData(chunk))
    socket.on('drain', () => this.safeDispatchEvent('drain'))
    socket.on('error', () => {})
    socket.on('close', () => this.onTransportClosed())
  }

  sendData (data) {
    return { sentBytes: data.byteLength, canSendMore: this.socket.write(data.subarray().slice()) }
  }

  sendReset () { this.socket.destroy() }
  async sendClose () { this.socket.end() }
  sendPause () { this.socket.pause() }
  sendResume () { this.socket.resume() }
}

function ended (stream) {
  return new Promise((resolve, reject) => {
    stream.addEventListener('remoteCloseWrite', resolve)
    stream.addEventListener('close', (event) => event.error ? reject(event.error) : resolve())
  })
}

async function opened (muxer, mode, size, close) {
  const stream = await muxer.createStream()
  const payload = new Uint8Array(size).map((_, at) => at * 7 + stream.streamId)
  const parts = []
  let got = 0
  const whole = new Promise((resolve) => stream.addEventListener('message', (event) => {
    parts.push(event.data.subarray().slice())
    got += event.data.byteLength
    if (mode === 'e' && got >= size) resolve()
  }))
  const end = ended(stream)
  stream.send(bytes(mode))
  stream.send(payload)
  if (close) await stream.close()
  await (mode === 'e' ? whole : end)
  const answer = Buffer.concat(parts)
  const right = mode === 'e' ? answer.equals(Buffer.from(payload)) : answer.toString() === String(size)
  if (!close) await stream.close()
  await end
  return right
}

async function open (muxer, stream, line) {
  const [count, size] = line.split(' ').map(Number)
  const results = await Promise.all(Array.from({ length: count }, () => opened(muxer, 'e', size, false)))
  stream.send(bytes(results.every(Boolean) ? 'ok' : `${results.filter((right) => !right).length} echoes were wrong`))
}

const COMMANDS = {
  o: open,
  b: async (muxer, stream) => {
    stream.send(bytes(await opened(muxer, 'h', CHECKED, true) ? 'ok' : 'the answer was wrong'))
  },
  p: async (muxer, stream) => { stream.send(bytes(await muxer.ping() >= 0 ? 'ok' : 'no answer')) },
  g: async (muxer, stream) => {
    stream.send(bytes('ok'))
    await stream.close()
    await ended(stream).catch(() => {})
    await muxer.close()
  }
}

function serve (muxer, stream) {
  let mode = ''
  let text = ''
  let held = 0
  stream.addEventListener('message', (event) => {
    let data = event.data.subarray().slice()
    if (!mode) {
      mode = String.fromCharCode(data[0])
      data = data.slice(1)
    }
    if (mode === 'e' && data.byteLength) stream.send(data)
    held += data.byteLength
    if (mode in COMMANDS) {
      text += new TextDecoder().decode(data)
      if (text.endsWith('\n')) {
        COMMANDS[mode](muxer, stream, text.trim())
          .catch((error) => stream.send(bytes(`failed: ${error.message}`)))
          .finally(() => stream.close())
      }
    }
  })
  ended(stream).then(async () => {
    if (mode === 'h') stream.send(bytes(String(held)))
    if (!(mode in COMMANDS)) await stream.close()
  }).catch(() => {})
}

function run (socket, direction) {
  socket.setNoDelay(true)
  const muxer = yamux({ enableKeepAlive: false, maxEarlyStreams: 1000 })().createStreamMuxer(
    new SocketConnection(socket, direction))
  muxer.addEventListener('stream', (event) => serve(muxer, event.detail))
  socket.on('close', () => {
    console.log(`go-away ${muxer.remoteGoAway ?? 'none'}`)
    process.exit(0)
  })
}

const [how, port] = process.argv.slice(2)
if (how === 'dial') {
  const socket = net.connect(Number(port), '127.0.0.1', () => run(socket, 'outbound'))
} else {
  const server = net.createServer((socket) => { server.close(); run(socket, 'inbound') })
  server.listen(0, '127.0.0.1', () => console.log(server.address().port))
}
