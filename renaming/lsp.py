"""Find, by pyright's language server, where symbols are used."""
import json, subprocess, threading, queue, pathlib, sys, time, itertools, urllib.parse
class Lsp:
    def __init__(self, root):
        self.root=pathlib.Path(root).resolve()
        self.p=subprocess.Popen([".venv/bin/pyright-langserver","--stdio"],stdin=subprocess.PIPE,stdout=subprocess.PIPE,stderr=subprocess.DEVNULL,cwd=self.root)
        self.ids=itertools.count(1); self.answers={}; self.cv=threading.Condition()
        threading.Thread(target=self._read,daemon=True).start()
        self.request("initialize",{"processId":None,"rootUri":self.uri("."),"capabilities":{"workspace":{"configuration":True,"workspaceFolders":True},"textDocument":{"references":{},"definition":{}}},"workspaceFolders":[{"uri":self.uri("."),"name":"w"}]})
        self.notify("initialized",{})
    def uri(self,p): return (self.root/p).resolve().as_uri()
    def _send(self,m):
        b=json.dumps({"jsonrpc":"2.0",**m}).encode(); self.p.stdin.write(b"Content-Length: %d\r\n\r\n"%len(b)+b); self.p.stdin.flush()
    def notify(self,method,params): self._send({"method":method,"params":params})
    def request(self,method,params,timeout=600):
        i=next(self.ids); self._send({"id":i,"method":method,"params":params})
        with self.cv:
            if not self.cv.wait_for(lambda: i in self.answers,timeout): raise TimeoutError(method)
            m=self.answers.pop(i)
        if "error" in m: raise RuntimeError(m["error"])
        return m.get("result")
    def _read(self):
        f=self.p.stdout
        while True:
            n=0
            while True:
                line=f.readline()
                if not line: return
                if line==b"\r\n": break
                if line.lower().startswith(b"content-length"): n=int(line.split(b":")[1])
            m=json.loads(f.read(n))
            if "method" in m and "id" in m:
                if m["method"]=="workspace/configuration": r=[{"analysis":{"diagnosticMode":"workspace","indexing":True},"pythonPath":".venv/bin/python"} if it.get("section")=="python" else {"diagnosticMode":"openFilesOnly"} if it.get("section")=="python.analysis" else {} for it in m["params"]["items"]]
                else: r=None
                self._send({"id":m["id"],"result":r})
            elif "id" in m:
                with self.cv: self.answers[m["id"]]=m; self.cv.notify_all()
    def open(self,p):
        self.notify("textDocument/didOpen",{"textDocument":{"uri":self.uri(p),"languageId":"python","version":1,"text":(self.root/p).read_text()}})
    def references(self,p,line,col):
        r=self.request("textDocument/references",{"textDocument":{"uri":self.uri(p)},"position":{"line":line,"character":col},"context":{"includeDeclaration":True}})
        out=[]
        for x in r or []:
            path=pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(x["uri"]).path))
            out.append((str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path),x["range"]["start"]["line"],x["range"]["start"]["character"],x["range"]["end"]["character"]))
        return out
if __name__=="__main__":
    l=Lsp(sys.argv[1])
    f,name=sys.argv[2:4]
    l.open(f); time.sleep(float(__import__('os').environ.get('WAIT','5')))
    t=(l.root/f).read_text().split("\n")
    for pat in sys.argv[3:]:
        for i,s in enumerate(t):
            if pat in s:
                t0=time.time(); col=s.index(pat)+pat.rstrip(" :(=").rfind(" ")+1
                r=l.references(f,i,col); print(pat,len(r),time.time()-t0); 
                import collections; print(collections.Counter(x[0].split("/")[0] for x in r)); print(r[:5])
                break
