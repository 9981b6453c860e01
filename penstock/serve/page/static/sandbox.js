/*! Built from web/source of Penstock. Licences of libraries: vendor/ */
"use strict";const runner=e=>`"use strict";
self.onmessage = async ({ data }) => {
  try {
    const answer = await (${e}
)(data);
    self.postMessage(typeof answer === "string" ? answer : JSON.stringify(answer) ?? "null");
  } catch (error) {
    self.postMessage("Error: " + error);
  }
};`;addEventListener("message",({data:e,ports:[a]})=>{const n=URL.createObjectURL(new Blob([runner(e.code)],{type:"text/javascript"})),r=new Worker(n),s=t=>{clearTimeout(i),r.terminate(),URL.revokeObjectURL(n),a.postMessage(t)},i=setTimeout(()=>s(`Error: the function did not finish within ${e.limitS} s.`),e.limitS*1e3);r.onmessage=t=>s(t.data),r.onerror=t=>s(`Error: ${t.message||"the function could not be parsed"}`);let o;try{o=JSON.parse(e.argumentsText||"{}")}catch{return s("Error: the arguments of the call are not valid JSON.")}r.postMessage(o)});
