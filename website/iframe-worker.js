// Browsers refuse workers to pages opened from files. There, the theme's search runs in a hidden frame.
// The plugin `offline` loads such a script from another host, unless a polyfill has the name of this one.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html>" // loads once; the empty first document of a frame may be replaced
      this.inside = new Promise((resolve, reject) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = new URL(url, location)
          script.onload = () => resolve(inside)
          script.onerror = reject
          inside.document.body.append(script)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
